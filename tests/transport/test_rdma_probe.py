"""The probe on a fake libibverbs, and on what this machine really has."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest

from megatron_ext.errors import TransportError
from megatron_ext.transport.native import probe_rdma, require_native
from tests.rdma_vm import witness

from .fake_verbs import build_fake_verbs, make_sysfs


@pytest.fixture(scope="session")
def fake_library(native, tmp_path_factory) -> Path:
    return build_fake_verbs(tmp_path_factory.mktemp("fake_verbs"))


@pytest.fixture
def sysfs(fake_library, tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("MEGATRON_EXT_IBVERBS_LIB", str(fake_library))
    monkeypatch.delenv("FAKE_VERBS", raising=False)
    return str(make_sysfs(tmp_path))


def test_a_usable_device_is_told_with_its_port_and_gid(sysfs):
    found = "fake0 port 1 GID 1 (::ffff:10.77.0.1), MTU 1024"
    assert probe_rdma(sysfs=sysfs) == (True, found, "")
    assert probe_rdma(sysfs=sysfs).why_not == ""
    assert [step.step for step in require_native().probe_rdma("", sysfs)] == [
        "library", "devices", "port", "memory", "queue pair",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "reason", "remedy"),
    [
        (
            "no_device",
            "devices: this host has no RDMA device",
            "use --pipeline-transport tcp",
        ),
        (f"open={errno.EACCES}", "fake0 cannot be opened", "--device=/dev/infiniband"),
        ("port_down", "fake0 port 1 is down", "rdma link"),
        (f"reg_mr={errno.ENOMEM}", "memory: 1048576 bytes", "ulimit -l unlimited"),
        (
            f"rtr={errno.EINVAL}",
            "queue pair: RDMA queue pair",
            "MEGATRON_EXT_IB_GID_INDEX",
        ),
    ],
)
def test_what_is_missing_is_told_in_one_line_with_a_remedy(
    sysfs, monkeypatch, fault, reason, remedy
):
    monkeypatch.setenv("FAKE_VERBS", fault)
    result = probe_rdma(sysfs=sysfs)
    assert not result.usable
    assert reason in result.finding
    assert remedy in result.remedy
    assert result.why_not.startswith(result.finding)
    assert result.why_not.endswith(result.remedy)
    assert "\n" not in result.why_not


def test_an_address_chooses_the_gid(sysfs):
    assert "GID 3 (2001:db8::1)" in probe_rdma("2001:db8::1", sysfs=sysfs).finding
    assert (
        "does not have the address 10.9.9.9"
        in probe_rdma("10.9.9.9", sysfs=sysfs).why_not
    )


def test_malformed_settings_are_errors(sysfs, monkeypatch):
    with pytest.raises(TransportError, match="got 'node7'"):
        probe_rdma("node7", sysfs=sysfs)
    monkeypatch.setenv("MEGATRON_EXT_IB_RETRY", "7")
    with pytest.raises(
        TransportError, match="MEGATRON_EXT_IB_RETRY must be a number from 0 to 6"
    ):
        probe_rdma(sysfs=sysfs)


def test_without_the_native_module_that_is_the_finding(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron_ext.transport._C", None)
    result = probe_rdma()
    assert not result.usable
    assert (
        "native module: The native module megatron_ext.transport._C is"
        in result.why_not
    )


def test_this_machine_is_judged_as_pyverbs_judges_it(native, monkeypatch):
    monkeypatch.delenv("MEGATRON_EXT_IBVERBS_LIB", raising=False)
    differences = witness.differences()
    if differences is None:
        pytest.skip("pyverbs or libibverbs is not installed (Debian: python3-pyverbs)")
    assert differences == []


def test_a_witness_that_sees_something_else_is_quoted(sysfs, monkeypatch):
    monkeypatch.setattr(
        witness,
        "from_pyverbs",
        lambda: {"fake0 port 1 LID": "7", "fake0 port 1 MTU": "1024"},
    )
    differences = witness.differences(sysfs)
    assert differences is not None
    assert "fake0 port 1 LID: 0, pyverbs says 7" in differences
    assert any(
        "GID 1: 0000:" in line and "says missing" in line for line in differences
    )
    assert not any("MTU" in line for line in differences)
