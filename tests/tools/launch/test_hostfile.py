"""Hostfiles: what they may say; every other text ends in one line of error."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import LaunchError
from megatron_ext.tools.launch.hostfile import MAX_SLOTS, Host, parse, read, select

HOSTFILES = Path(__file__).parents[3] / "hostfiles"


def names(hosts: tuple[Host, ...]) -> list[str]:
    return [host.name for host in hosts]


def test_a_list_of_addresses_is_a_hostfile() -> None:
    hosts = parse("node1-ip\n\n  # a comment\n10.0.0.2   # another\nnode_3.cluster")
    assert hosts == (Host("node1-ip"), Host("10.0.0.2"), Host("node_3.cluster"))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_of_any_system_and_none_at_the_end(end: str) -> None:
    assert names(parse(f"a{end}{end}b\tslots=2{end}c")) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "line",
    ["node:4", "node slots=4", "node\tslots=4 max_slots=8", "node:4 max_slots=4"],
)
def test_the_formats_of_others_are_understood(line: str) -> None:
    assert parse(line) == (Host("node", slots=4),)


def test_every_key() -> None:
    text = (
        "[fe80::1]:2 addr=fd00::1 rdma=10.1.0.1,fd00::2 port=2222 user=me type=a100 "
        "env.A=1 env.B=x=y"
    )
    assert parse(text) == (
        Host("fe80::1", 2, "fd00::1", 2222, "me", ("10.1.0.1", "fd00::2"),
             (("A", "1"), ("B", "x=y"))),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "hosts contains no host; write one host per line"),
        ("# only a comment\n", "contains no host"),
        ("a\nb\na\n", "hosts:3: host a is already in line 1"),
        ("a\nA", "hosts:2: host A is already in line 1"),
        ("10.0.0.1\nb addr=10.0.0.1", "hosts:2: host b is already in line 1"),
        ("a slots=0", "hosts:1: slots is '0'; it must be a number of processes"),
        ("a slots=two", "slots is 'two'"),
        ("a slots=99999", "slots is '99999'"),
        ("a:x", "slots is 'x'"),
        ("a:4 slots=4", "slots is set twice for a"),
        ("a port=0", "port is '0'; it must be a port from 1 to 65535"),
        ("a port=99999", "port is '99999'"),
        ("a addr=b", "addr is 'b'; it must be an IP address"),
        ("a rdma=10.0.0.1,", "rdma is '10.0.0.1,'; it must be a comma-separated list"),
        ("a user=-oProxyCommand=x", "it must be a user name"),
        ("-oProxyCommand=x", "is not a host; write NAME"),
        ("a slot=3", "unknown key 'slot'; keys are slots, addr"),
        ("a 4", "expected key=value after the host, found '4'"),
        ("a env.=1", "does not name an environment variable"),
        (
            "fe80::1",
            "is not a host; write NAME, NAME:SLOTS, or an IPv6 address in brackets",
        ),
        ("[10.0.0]", "the address in brackets is '10.0.0'"),
    ],
)
def test_mistakes_name_file_line_value_and_rule(text: str, message: str) -> None:
    with pytest.raises(LaunchError) as error:
        parse(text, "hosts")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


WORDS = st.sampled_from(
    ["a", "b", "[::1]", ":", "4", "slots=", "addr=", "env.", "=", "#", " ", "\t", "\n", "\r", "\0",
     "10.0.0.1", "rdma=", ",", "@", "\u2028", "\u0664", "port=22", "\ufeff"]
)  # fmt: skip


@given(st.one_of(st.text(), st.lists(WORDS).map("".join)))
def test_no_text_ends_in_a_traceback(text: str) -> None:
    try:
        hosts = parse(text)
    except LaunchError:
        return
    assert hosts
    assert len(set(names(hosts))) == len(hosts)
    for host in hosts:
        assert not host.name.startswith("-")
        assert host.slots is None or 1 <= host.slots <= MAX_SLOTS


@given(st.text(), st.booleans())
def test_no_filter_ends_in_a_traceback(text: str, include: bool) -> None:
    hosts = parse("a slots=4\nb slots=4\n")
    try:
        chosen = select(hosts, text if include else None, None if include else text)
    except LaunchError:
        return
    assert set(names(chosen)) <= {"a", "b"}


HOSTS = parse("a slots=4\nb slots=4\n[fe80::1]")


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("b@a", None, ["a", "b"]),
        (None, "a@[fe80::1]", ["b"]),
        ("fe80::1", None, ["fe80::1"]),
        (None, None, ["a", "b", "fe80::1"]),
    ],
)
def test_hosts_are_chosen_as_in_deepspeed(
    include: str | None, exclude: str | None, expected: list[str]
) -> None:
    assert names(select(HOSTS, include, exclude)) == expected


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        (
            "d",
            None,
            "--include names the unknown host 'd'; the hosts are a, b, fe80::1",
        ),
        ("", None, "--include names the unknown host ''"),
        (
            "a:0,2",
            None,
            "host 'a:0,2'; .*; to select devices, set env.CUDA_VISIBLE_DEVICES",
        ),
        (None, "a@b@fe80::1", "removes every host"),
        ("a", "b", "both set"),
    ],
)
def test_filters_that_fit_no_host(
    include: str | None, exclude: str | None, message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        select(HOSTS, include, exclude)


def test_the_hostfiles_that_come_with_the_repository() -> None:
    assert read(HOSTFILES / "localhost") == (Host("localhost", 4),)
    assert names(read(HOSTFILES / "two-nodes.example")) == ["10.0.0.1", "10.0.0.2"]
    mixed = read(HOSTFILES / "mixed-slots.example")
    assert [(host.slots, host.address) for host in mixed] == [
        (8, "10.0.0.1"),
        (4, "10.0.0.2"),
    ]
    assert mixed[1].env == (("NCCL_DEBUG", "WARN"),)


def test_files_that_are_no_hostfile(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot be read: No such file"):
        read(tmp_path / "gone")
    with pytest.raises(LaunchError, match="cannot be read: Is a directory"):
        read(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(LaunchError, match="is not text"):
        read(tmp_path / "binary")
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfa\n")
    assert names(read(tmp_path / "marked")) == ["a"]
