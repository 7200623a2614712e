"""The device of a process, and the error if it cannot use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext import devices
from megatron_ext.devices.cpu import CpuDevice
from megatron_ext.errors import DeviceError

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGATRON_EXT_DEVICE", raising=False)


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ([], "auto"),
        (["--device-backend", "cpu"], "cpu"),
        (["--device-backend=musa", "--bf16"], "musa"),
        (["--device-backend=musa", "--device-backend", "cpu"], "cpu"),
    ],
)
def test_the_command_line_asks(argv: list[str], name: str) -> None:
    assert devices.requested(["train.py", *argv]) == name


def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_EXT_DEVICE", "cpu")
    assert devices.requested(["train.py", "--device-backend", "musa"]) == "cpu"


@pytest.mark.parametrize("argv", [["--device-backend", "tpu"], ["--device-backend"]])
def test_an_unknown_name_lists_the_choices(argv: list[str]) -> None:
    with pytest.raises(DeviceError, match="auto, cuda, musa, cpu"):
        devices.requested(["train.py", *argv])


def test_an_unknown_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_EXT_DEVICE", "gpu")
    with pytest.raises(DeviceError, match="MEGATRON_EXT_DEVICE is 'gpu'"):
        devices.requested([])


def test_select_refuses_an_unknown_name() -> None:
    with pytest.raises(DeviceError, match="no device backend 'tpu'"):
        devices.select("tpu")


def test_select_names_the_reasons_if_no_device_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuDevice, "missing", lambda _: "no gloo")
    for name in ("cuda", "musa"):
        monkeypatch.setattr(type(devices.named(name)), "missing", lambda _: "no GPU")
    with pytest.raises(DeviceError, match=r"cuda: no GPU; musa: no GPU; cpu: no gloo"):
        devices.select("auto")


def test_select_refuses_a_device_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        CpuDevice, "missing", lambda _self: "torch was built without gloo"
    )
    with pytest.raises(
        DeviceError, match="cpu cannot run here: torch was built without gloo"
    ):
        devices.select("cpu")


def _run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process without a GPU whose device is chosen from nothing but `env`."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MEGATRON_")}
    clean.update(
        PYTHONPATH=str(_ROOT), CUDA_VISIBLE_DEVICES="", PYTHONWARNINGS="ignore", **env
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        env=clean,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_auto_takes_the_host_where_nothing_else_is() -> None:
    ended = _run("from megatron_ext import devices; print(devices.select('auto').name)")
    assert ended.stdout == "cpu\n", ended.stderr


def test_cuda_without_a_gpu_says_what_is_missing() -> None:
    ended = _run("from megatron_ext import devices; devices.select('cuda')")
    last = ended.stderr.splitlines()[-1]
    assert "device backend cuda cannot run here" in last
    assert "built without CUDA" in last or "sees no GPU" in last


def test_importing_the_package_decides_nothing() -> None:
    ended = _run("import sys, megatron_ext; print('torch' in sys.modules)")
    assert ended.stdout == "False\n", ended.stderr


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ({}, 2),
        ({"CUDA_VISIBLE_DEVICES": "1,3,GPU-4a"}, 3),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "", "MUSA_VISIBLE_DEVICES": "0"}, 1),
    ],
)
def test_devices_that_the_environment_hides_do_not_count(
    visible: dict[str, str], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    for name in devices.VISIBLE_DEVICES:
        monkeypatch.delenv(name, raising=False)
    assert devices.count_devices(tmp_path, visible) == count
    for name, value in visible.items():
        monkeypatch.setenv(name, value)
    assert devices.count_devices(tmp_path) == count
