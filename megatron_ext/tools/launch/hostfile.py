"""The hostfile, which lists one host per line; the simplest line is just an address.

    # comment
    node1
    10.0.0.2            slots=8
    node3:4             addr=10.0.0.3 rdma=10.1.0.3,10.1.1.3 port=2222 user=me env.NCCL_DEBUG=INFO

The line order determines the node ranks. Plain lists of addresses, DeepSpeed's and Open MPI's
`slots=N` and MPICH's `host:N` are all valid. These functions only parse text and never use the
network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from megatron_ext.errors import LaunchError
from megatron_ext.files import read_text

MAX_SLOTS = 1024
"""Maximum number of processes on a host. A larger number must be a typo."""
_MAX_BYTES = 16 << 20
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?"
# NAME or [IPv6], optionally followed by :SLOTS.
_HOST = re.compile(
    rf"(?:\[(?P<ipv6>[^\]\s]*)\]|(?P<name>{_NAME}))(?::(?P<slots>[^:\s]*))?"
)


@dataclass(frozen=True)
class Host:
    """One line in a hostfile."""

    name: str
    """The destination for ssh: a name, an alias in the ssh configuration, or an address."""
    slots: int | None = None
    """Number of processes on this host. None: as many as it has devices."""
    addr: str | None = None
    """Address at which the other hosts reach this one. None: its name."""
    port: int | None = None
    """Port of the ssh server. None: the ssh configuration decides."""
    user: str | None = None
    """User to log in as. None: the ssh configuration decides."""
    rdma: tuple[str, ...] = ()
    """Addresses of the RDMA interfaces."""
    env: tuple[tuple[str, str], ...] = ()
    """Environment variables for processes on this host."""
    number: int = 0
    """Index among the launch's hosts. Restarting the job on other hosts does not change it."""
    local: bool = False
    """True for the launcher's own machine, which needs no ssh."""

    @property
    def address(self) -> str:
        """The address that other hosts connect to."""
        return self.addr or self.name


def _number(limit: int) -> Callable[[str], int | None]:
    # int() alone would accept signs, spaces, underscores and digits in other scripts.
    def convert(text: str) -> int | None:
        if not re.fullmatch(r"[0-9]{1,5}", text):
            return None
        number = int(text)
        return number if number <= limit else None

    return convert


# Key -> (conversion from text, falsy if the text is invalid; description of valid text).
_KEYS: dict[str, tuple[Callable[[str], Any], str]] = {
    "slots": (_number(MAX_SLOTS), f"a number of processes, 1 to {MAX_SLOTS}"),
    # Open MPI's upper bound; it has no effect, because a host starts at most `slots` processes.
    "max_slots": (_number(MAX_SLOTS), "a number"),
    "addr": (lambda text: str(ip_address(text)), "an IP address"),
    "port": (_number(65535), "a port from 1 to 65535"),
    # ssh would parse a name with a leading dash as an option.
    "user": (
        lambda text: re.fullmatch(r"[A-Za-z_][A-Za-z0-9._-]{0,63}", text) and text,
        "a user name",
    ),
    "rdma": (
        lambda text: tuple(str(ip_address(word)) for word in text.split(",")),
        "a comma-separated list of IP addresses",
    ),
    # FlagScale's device type.
    "type": (
        lambda text: re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text) and text,
        "one word",
    ),
}
_KEY_LIST = "slots, addr, port, user, rdma, type and env.NAME"


def read(path: Path) -> tuple[Host, ...]:
    """Parse a hostfile from disk."""
    try:
        text = read_text(path, _MAX_BYTES)
        # Some editors on Windows write a byte order mark.
        text = text.removeprefix("\ufeff")
        return parse(text, str(path))
    except OSError as error:
        why = f"cannot be read: {error.strerror}; use a file with one host per line"
    except UnicodeDecodeError:
        why = "is not text (UTF-8); write one host per line"
    raise LaunchError(f"the hostfile {path} {why}")


def parse(text: str, source: str = "hostfile") -> tuple[Host, ...]:
    """Parse a hostfile's text; `source` is its name in errors.

    Raises:
        LaunchError: The text is malformed. The message names the line.
    """
    hosts: list[Host] = []
    # Name, or address and port -> the first line that contains it.
    lines: dict[object, int] = {}
    # Do not use splitlines(), which also splits at characters that do not end a line in
    # a file.
    text_lines = re.split(r"\r\n|\n|\r", text)
    for number, line in enumerate(text_lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _host(words)
            # Names are case-insensitive. Two ssh ports on one address may belong to two containers.
            name = host.name.lower()
            address_and_port = (host.address.lower(), host.port)
            for identity in (name, address_and_port):
                first = lines.setdefault(identity, number)
                if first != number:
                    raise ValueError(
                        f"host {host.name} is already in line {first}; list each host once and "
                        f"set its number of processes with slots=N"
                    )
        except ValueError as error:
            raise LaunchError(f"{source}:{number}: {error}") from None
        hosts.append(host)
    if not hosts:
        raise LaunchError(f"{source} contains no host; write one host per line")
    return tuple(hosts)


def _host(words: list[str]) -> Host:
    match = _HOST.fullmatch(words[0])
    if match is None:
        raise ValueError(
            f"{words[0]!r} is not a host; write NAME, NAME:SLOTS, or an IPv6 address in brackets; "
            f"a name consists of letters, digits, dots, dashes and underscores"
        )
    name = match["name"] or _value("the address in brackets", match["ipv6"], "addr")
    fields: dict[str, Any] = {}
    env: list[tuple[str, str]] = []
    keys = words[1:]
    if match["slots"] is not None:  # NAME:SLOTS
        keys.insert(0, f"slots={match['slots']}")
    for word in keys:
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(
                f"expected key=value after the host, found {word!r}; keys are {_KEY_LIST}"
            )
        if key in fields:
            raise ValueError(f"{key} is set twice for {name}; set it once")
        if key in _KEYS:
            fields[key] = _value(key, value, key)
        elif not key.startswith("env."):
            raise ValueError(f"unknown key {key!r}; keys are {_KEY_LIST}")
        elif not re.fullmatch(r"env\.[A-Za-z_][A-Za-z0-9_]*", key) or "\0" in value:
            raise ValueError(
                f"{word!r} does not name an environment variable; write env.NAME=VALUE"
            )
        else:
            env.append((key.removeprefix("env."), value))
            # Keep the variable until all words are read, to detect duplicates.
            fields[key] = value
    env_keys = [key for key in fields if key.startswith("env.")]
    for key in env_keys:
        del fields[key]
    # Other launchers use these keys, so accept but ignore them.
    for key in ("max_slots", "type"):
        fields.pop(key, None)
    return Host(name, env=tuple(env), **fields)


def _value(shown: str, text: str, key: str) -> Any:
    convert, meaning = _KEYS[key]
    with suppress(ValueError):
        value = convert(text)
        if value:
            return value
    raise ValueError(f"{shown} is {text!r}; it must be {meaning}")


def select(
    hosts: Sequence[Host],
    include: str | None = None,
    exclude: str | None = None,
) -> tuple[Host, ...]:
    """Return the hosts in `--include`, or all hosts not in `--exclude`.

    Both have the form `host1@host2`.

    Raises:
        LaunchError: Both are set, or one of them names an unknown host or leaves no hosts.
    """
    # Do not guess which of the two applies first.
    if include is not None and exclude is not None:
        raise LaunchError("--include and --exclude are both set; use only one of them")
    flag = "--include"
    text = include
    if include is None:
        flag = "--exclude"
        text = exclude
    if text is None:
        return tuple(hosts)
    host_names = [host.name for host in hosts]
    # IPv6 addresses have brackets in a hostfile, but `Host.name` has none.
    named = {part.strip("[]") for part in text.split("@")}
    for name in sorted(named.difference(host_names)):
        line = f"{flag} names the unknown host {name!r}; the hosts are {', '.join(host_names)}"
        name_before_colon, _, _ = name.partition(":")
        if name_before_colon in host_names:
            # DeepSpeed selects devices like this: host:0,1.
            line += (
                "; to select devices, set env.CUDA_VISIBLE_DEVICES=LIST in the hostfile"
            )
        raise LaunchError(line)
    if exclude is None:
        return tuple(host for host in hosts if host.name in named)
    remaining = tuple(host for host in hosts if host.name not in named)
    if not remaining:
        raise LaunchError("--exclude removes every host; exclude fewer hosts")
    return remaining
