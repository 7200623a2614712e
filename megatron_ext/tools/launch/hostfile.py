"""The hostfile: one host on each line, in the simplest case a list of addresses.

    # comment
    node1
    10.0.0.2            slots=8
    node3:4             addr=10.0.0.3 rdma=10.1.0.3,10.1.1.3 port=2222 user=me env.NCCL_DEBUG=INFO

The order of the lines is the order of the node ranks. Lists of addresses, DeepSpeed's and
Open MPI's `slots=N` and MPICH's `host:N` are all valid. Pure functions of text, no network.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ext.errors import LaunchError
from megatron_ext.text_file import read_text

__all__ = ["Host", "parse", "read", "select"]

MAX_SLOTS = 1024
"""Upper bound on the processes of a host; larger numbers are typing mistakes."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,63}")
_TYPE = re.compile(r"[A-Za-z0-9._-]{1,64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HOST = re.compile(r"(?:\[(?P<ipv6>[^\]\s]*)\]|(?P<name>[^:\[\]\s]*))(?::(?P<slots>[^:\s]*))?")


@dataclass(frozen=True)
class Host:
    """One line of a hostfile."""

    name: str
    """Destination of ssh: a name, an alias of the ssh configuration, or an address."""
    slots: int | None = None
    """Processes on this host; None: as many as it has devices."""
    addr: str | None = None
    """Address that the other hosts reach it by; None: its name."""
    port: int | None = None
    """Port of its ssh server; None: what the ssh configuration says."""
    user: str | None = None
    """User to log in as; None: what the ssh configuration says."""
    rdma: tuple[str, ...] = ()
    """Addresses of its RDMA interfaces."""
    type: str | None = None
    """A free-form word that plans show."""
    env: tuple[tuple[str, str], ...] = ()
    """Environment variables of its processes."""
    devices: tuple[int, ...] | None = None
    """The devices to use, by number (`--include`); None: the first `slots`."""

    @property
    def address(self) -> str:
        """The address that other hosts connect to."""
        return self.addr or self.name


_MAX_BYTES = 16 << 20


def read(path: Path) -> tuple[Host, ...]:
    """Parse a hostfile from disk.

    Raises:
        LaunchError: It cannot be read, is not text, or is malformed (see `parse`).
    """
    try:
        text = read_text(path, _MAX_BYTES).removeprefix("\ufeff")
    except OSError as error:
        raise LaunchError(
            f"the hostfile {path} cannot be read: {error.strerror}; give one host on a line"
        ) from None
    except UnicodeDecodeError:
        raise LaunchError(
            f"the hostfile {path} is not text (UTF-8); write one host on a line"
        ) from None
    return parse(text, str(path))


def parse(text: str, source: str = "hostfile") -> tuple[Host, ...]:
    """Parse the text of a hostfile.

    Args:
        text: Its content; line ends may be those of any system.
        source: Its name, for errors.

    Raises:
        LaunchError: A line is malformed, a host is listed twice, or there are no hosts.
    """
    hosts: list[Host] = []
    lines: dict[object, int] = {}
    # Not splitlines(): it also splits at characters that do not end a line in a file.
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _host(words)
        except ValueError as error:
            raise LaunchError(f"{source}:{number}: {error}") from None
        # Host names are case-insensitive; two ssh ports of one address may be two containers.
        for known in (host.name.lower(), (host.address.lower(), host.port)):
            first = lines.setdefault(known, number)
            if first != number:
                raise LaunchError(
                    f"{source}:{number}: host {host.name} is already in line {first}; name "
                    f"each host once and give it more processes with slots=N"
                )
        hosts.append(host)
    if not hosts:
        raise LaunchError(f"{source} names no host; write one host on a line")
    return tuple(hosts)


def _host(words: list[str]) -> Host:
    match = _HOST.fullmatch(words[0])
    if match is None:
        raise ValueError(
            f"{words[0]!r} is not a host; write NAME, NAME:SLOTS, or an IPv6 address in brackets"
        )
    if match["ipv6"] is not None:
        name = _address("the address in brackets", match["ipv6"])
    else:
        name = match["name"]
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is not a host name; use letters, digits, dots, dashes and underscores"
            )
    host = Host(name)
    if match["slots"] is not None:
        host = replace(host, slots=_slots("slots", match["slots"]))
    seen = {"slots"} if host.slots else set()
    for word in words[1:]:
        host = _with_key(host, word, seen)
    return host


def _with_key(host: Host, word: str, seen: set[str]) -> Host:
    """Return the host with one `key=value` added."""
    key, equals, value = word.partition("=")
    if not equals:
        raise ValueError(f"expected key=value after the host, found {word!r}; keys are {_KEY_LIST}")
    if key in seen:
        raise ValueError(f"{key} is given twice for {host.name}; give it once")
    seen.add(key)
    if key.startswith("env."):
        name = key[len("env.") :]
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            raise ValueError(f"{word!r} names no environment variable; write env.NAME=VALUE")
        return replace(host, env=(*host.env, (name, value)))
    if key not in _KEYS:
        raise ValueError(f"unknown key {key!r}; keys are {_KEY_LIST}")
    field, convert = _KEYS[key]
    converted = convert(key, value)
    return host if field is None else replace(host, **{field: converted})


def _slots(key: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,4}", text) or not 1 <= int(text) <= MAX_SLOTS:
        raise ValueError(f"{key} is {text!r}; it must be a number of processes, 1 to {MAX_SLOTS}")
    return int(text)


def _port(key: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= 65535:
        raise ValueError(f"{key} is {text!r}; it must be a port from 1 to 65535")
    return int(text)


def _address(key: str, text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ValueError(f"{key} is {text!r}; it must be an IP address") from None


def _addresses(key: str, text: str) -> tuple[str, ...]:
    return tuple(_address(key, part) for part in text.split(","))


def _matching(pattern: re.Pattern[str], meaning: str) -> Callable[[str, str], str]:
    def convert(key: str, text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"{key} is {text!r}; it must be {meaning}")
        return text

    return convert


_KEYS: dict[str, tuple[str | None, Callable[[str, str], Any]]] = {
    "slots": ("slots", _slots),
    "max_slots": (None, _slots),  # of Open MPI: we never start more than `slots`
    "addr": ("addr", _address),
    "port": ("port", _port),
    "user": ("user", _matching(_USER, "the name of a user")),
    "rdma": ("rdma", _addresses),
    "type": ("type", _matching(_TYPE, "one word")),
}
_KEY_LIST = "slots, addr, port, user, rdma, type and env.NAME"


def select(
    hosts: Iterable[Host], include: str | None = None, exclude: str | None = None
) -> tuple[Host, ...]:
    """Restrict hosts and devices, in DeepSpeed's syntax: `host1@host2:0,2`.

    Args:
        hosts: All hosts, in order.
        include: Only these hosts; with `:0,2` only these devices of one.
        exclude: Not these hosts; with `:0,2` not these devices of one, which then needs `slots`.

    Raises:
        LaunchError: Both are given, an entry is malformed or names an unknown host or device, or
            no host remains.
    """
    chosen = tuple(hosts)
    if include is not None and exclude is not None:
        raise LaunchError("--include and --exclude are both given; use one of them")
    if include is not None:
        wanted = _filters("--include", include, chosen)
        chosen = tuple(
            _with_devices(host, wanted[host.name]) for host in chosen if host.name in wanted
        )
    if exclude is not None:
        unwanted = _filters("--exclude", exclude, chosen)
        kept = [_without_devices(host, unwanted[host.name]) if host.name in unwanted else host
                for host in chosen]  # fmt: skip
        chosen = tuple(host for host in kept if host is not None)
    if not chosen:
        raise LaunchError("--exclude leaves no host; exclude less")
    return chosen


def _filters(flag: str, text: str, hosts: tuple[Host, ...]) -> dict[str, tuple[int, ...]]:
    """Return host -> devices that a filter names (none: the whole host)."""
    known = {host.name: host for host in hosts}
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        match = _HOST.fullmatch(part)
        name = (match["ipv6"] or match["name"]) if match else part
        if match is None or name not in known:
            raise LaunchError(f"{flag} names {name!r}; the hosts are {', '.join(known)}")
        if name in found:
            raise LaunchError(f"{flag} names {name} twice; give all its devices at once")
        found[name] = _devices(flag, known[name], match["slots"])
    return found


def _devices(flag: str, host: Host, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    numbers = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,4}", number) for number in numbers):
        raise LaunchError(f"{flag} of {host.name} is {text!r}; give device numbers like 0,2")
    devices = tuple(sorted({int(number) for number in numbers}))
    if host.slots is not None and devices[-1] >= host.slots:
        raise LaunchError(
            f"{flag} names device {devices[-1]} of {host.name}, which has slots={host.slots} "
            f"(0 to {host.slots - 1})"
        )
    return devices


def _with_devices(host: Host, devices: tuple[int, ...]) -> Host:
    return replace(host, devices=devices, slots=len(devices)) if devices else host


def _without_devices(host: Host, devices: tuple[int, ...]) -> Host | None:
    if not devices:
        return None
    if host.slots is None:
        raise LaunchError(
            f"--exclude of devices of {host.name} needs its slots=N in the hostfile, to know what "
            f"is left"
        )
    left = tuple(device for device in range(host.slots) if device not in devices)
    return _with_devices(host, left) if left else None
