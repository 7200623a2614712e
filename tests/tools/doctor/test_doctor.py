"""The doctor: what it finds on this machine, and that each check can fail with a remedy."""

from __future__ import annotations

import json
import os
import resource
import sys
import typing
from importlib import metadata
from pathlib import Path

import pytest

from megatron_ext.config.pipeline_config import DynamicOrder
from megatron_ext.devices.cuda import CudaDevice
from megatron_ext.tools.doctor import checks
from megatron_ext.tools.doctor.checks import check_hosts
from megatron_ext.tools.doctor.flight import Diagnosis, arena_bytes, check_training
from megatron_ext.tools.launch.hostfile import Host
from megatron_ext.tools.launch.plan import JobPlan
from megatron_ext.upstream import releases
from tests.commands import run_package, run_python
from tests.pipelines import make_pipeline

FAKE_SSH = Path(__file__).parents[1] / "launch" / "fake_ssh.sh"


def levels(text: str) -> dict[str, str]:
    return {finding["check"]: finding["level"] for finding in json.loads(text)}


def test_this_machine_can_train_on_its_cpu() -> None:
    done = run_package("doctor", "--json")
    found = levels(done.stdout)
    assert done.returncode == ("FAIL" in found.values())
    sound = (
        "megatron_ext",
        "Python",
        "torch",
        "megatron-core",
        "device",
        "patches",
    )
    assert {check: found[check] for check in sound} == dict.fromkeys(sound, "OK")
    assert {"native core", "RDMA", "locked memory", "Megatron-LM tree"} <= set(found)
    for finding in json.loads(done.stdout):
        assert set(finding) == {"level", "check", "finding", "remedy"}
        assert finding["remedy"] or finding["level"] == "OK", finding


def test_flags_of_a_training_are_checked() -> None:
    flags = (
        "--pipeline-model-parallel-size 4 --num-layers 32 --pipeline-schedule zb-v "
        "--train-iters 10 --eval-interval 10 --hidden-size 64 --num-attention-heads 4 "
        "--seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --lr 1e-3 "
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 127"
    )
    done = run_package("doctor", "--json", "--", "pretrain_gpt.py", *flags.split())
    lines = [one for one in json.loads(done.stdout) if one["check"] == "training"]
    assert lines[-1] == {
        "level": "OK",
        "check": "training",
        "finding": "zb-v accepts these flags",
        "remedy": "",
    }
    [layout] = [one for one in json.loads(done.stdout) if one["check"] == "layout"]
    assert "--devices 64xh100" in layout["finding"]
    done = run_package("doctor", "--", *flags.split(), "--use-megatron-fsdp")
    assert done.returncode == 1
    assert (
        "FAIL training: --pipeline-schedule zb-v cannot run with --use-megatron-fsdp"
        in done.stdout
    )


def test_a_failed_check_is_a_line_with_a_remedy_and_exit_code_1(tmp_path: Path) -> None:
    for name in ("torch", "megatron_core"):
        folder = tmp_path / f"{name}-0.9.0.dist-info"
        folder.mkdir()
        title = name.replace("_", "-")
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {title}\nVersion: 0.9.0\n"
        )
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("")
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 9\nPATCH = 0\n")
    done = run_package("doctor", PYTHONPATH=str(tmp_path), MEGATRON_LM_PATH="/nowhere")
    assert done.returncode == 1, done.stderr
    assert "FAIL torch: 0.9.0; install torch >= 2.7" in done.stdout
    assert (
        "FAIL megatron-core: expected a version >=0.16.0,<0.21, found version 0.9.0"
        in done.stdout
    )
    assert (
        "FAIL Megatron-LM tree: MEGATRON_LM_PATH=/nowhere is not a Megatron-LM tree"
        in (done.stdout)
    )


def test_packages_that_do_not_go_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (
        ("transformers", "5.0.1"),
        ("wrapt", "2.4.0rc1"),
        ("rich", "12.0"),
    ):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {finding.check: finding for finding in checks.check_requirements()}
    assert sorted(found) == ["rich", "transformers"]
    assert str(found["rich"]) == (
        "WARN rich: 12.0, but megatron-ext requires >=13; pip install 'rich>=13'"
    )
    assert "5.0.1, but megatron-ext requires <5,>=4.51" in found["transformers"].finding


def test_a_package_that_is_needed_and_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(checks.metadata, "version", version)
    gone = {finding.check: finding for finding in checks.check_requirements()}
    assert {"wrapt", "rich", "numpy"} <= set(gone)
    assert "transformers" not in gone
    assert str(gone["numpy"]).startswith(
        "FAIL numpy: not installed, but megatron-core needs it; pip"
    )


@pytest.mark.parametrize(
    ("python", "filled_in", "level"),
    [((3, 11), False, "FAIL"), ((3, 11), True, "OK"), ((3, 12), True, "OK")],
)
def test_a_release_for_a_later_python(
    monkeypatch: pytest.MonkeyPatch,
    python: tuple[int, int],
    filled_in: bool,
    level: str,
) -> None:
    # `typing.override` is what the wheels for 3.11 lack, and later Pythons have.
    if filled_in:
        monkeypatch.setattr(typing, "override", lambda method: method, raising=False)
    else:
        monkeypatch.delattr(typing, "override", raising=False)
    monkeypatch.setattr(releases, "core_version", lambda: "0.19.2")
    monkeypatch.setattr(sys, "version_info", (*python, 0, "final", 0))
    [line] = [line for line in checks.check_versions() if line.check == "megatron-core"]
    assert line.level == level
    if level == "FAIL":
        assert line.finding == "0.19.2, which needs Python 3.12 or later"
        assert (
            line.remedy == "use Python 3.12, or pip install 'megatron-core>=0.16,<0.17'"
        )


def test_a_tree_of_another_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = tmp_path / "megatron" / "core"
    training = tmp_path / "megatron" / "training"
    for folder in (core, training):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 15\nPATCH = 3\n")
    (tmp_path / "pretrain_gpt.py").touch()
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tmp_path))
    [found] = checks.check_tree()
    assert found.level == "FAIL"
    installed = ".".join(map(str, releases.installed_release() or ()))
    assert (
        f"expected version {installed}, like the installed megatron-core"
        in found.finding
    )
    assert "found version 0.15.3" in found.finding
    assert "megatron-ext upstream fetch" in found.remedy
    assert "\n" not in str(found)


_NO_DRIVER = """
import torch
from tests.devices.cuda_build import is_real

def refuse():
    raise RuntimeError("Found no NVIDIA driver on your system. Please check that you have one")

if not is_real():
    torch.version.cuda, torch.cuda.init = "13.0", refuse
from megatron_ext.tools.doctor.checks import check_device
print(*check_device(), sep="\\n")
"""


def test_a_cuda_build_of_torch_without_a_driver() -> None:
    done = run_python(
        "-c", _NO_DRIVER, MEGATRON_EXT_DEVICE="auto", CUDA_VISIBLE_DEVICES=""
    )
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    assert line.startswith(
        "WARN device: cpu, with a CUDA build of torch: Found no NVIDIA driver"
    )
    assert "set MEGATRON_EXT_DEVICE=cpu" in line
    assert "nvidia-smi" in line
    asked = run_python("-c", _NO_DRIVER, MEGATRON_EXT_DEVICE="cpu")
    assert asked.stdout == "OK   device: cpu, collectives via gloo, as requested\n"


@pytest.mark.parametrize("installed", [False, True])
def test_kernels_that_megatron_expects_on_cuda(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks.devices, "current", CudaDevice)
    monkeypatch.setattr(
        checks, "find_spec", lambda module: object() if installed else None
    )
    device_line, *kernels = map(str, checks.check_device())
    assert device_line.startswith("OK   device: cuda, collectives via nccl")
    wanted = [
        "--transformer-impl local --no-persist",
        "--no-gradient-accumulation-fusion",
    ]
    for line, flags in zip(kernels, [] if installed else wanted, strict=True):
        assert line.startswith("WARN")
        assert flags in line


def hosts_found(*names: str) -> dict[str, Diagnosis]:
    hosts = tuple(map(Host, names))
    plan = JobPlan(
        "check", hosts, ("true",), str(Path.cwd()), sys.executable, per_node=True,
        ssh=("sh", str(FAKE_SSH)),
    )  # fmt: skip
    return {finding.check: finding for finding in check_hosts(plan, 30)}


def test_hosts_are_asked_as_a_launch_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site" / "torch-1.0.0.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n"
    )
    monkeypatch.setenv("OLD_SITE", str(site.parent))
    monkeypatch.setenv("MEGATRON_EXT_RUNS", str(tmp_path / "runs"))
    found = hosts_found("a", "b", "old")
    assert [found[f"host {name}"].level for name in ("a", "b", "old")] == [
        "OK",
        "OK",
        "FAIL",
    ]
    assert "torch 1.0.0, but a has" in found["host old"].finding
    refused = hosts_found("a", "password")
    assert refused["host password"].level == "FAIL"
    assert "ssh-copy-id password" in refused["host password"].remedy
    assert not list(tmp_path.glob("runs/*"))


def test_each_warning_of_a_host_is_shown_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warning = (
        "64 MiB are free in /dev/shm, and data loaders and NCCL take more; give it more"
    )
    hello = {
        "same": {"torch": "2", "megatron-core": "0.16"}, "devices": 0, "free_bytes": 1 << 40,
        "ahead_s": 60.0, "problems": [], "warnings": [warning],
    }  # fmt: skip
    monkeypatch.setattr(checks.Agents, "ask", lambda *_: [hello])
    plan = JobPlan("check", (Host("a"),), ("true",), "/", sys.executable)
    found = [f for f in check_hosts(plan, 30) if f.level == "WARN"]
    assert {f.finding.split(",")[0]: f.remedy for f in found} == {
        "64 MiB are free in /dev/shm": "give it more",
        "its clock is +60 s off this machine's": "synchronize it with NTP or chrony",
    }


def test_mistakes_are_told_before_anything_is_looked_at(tmp_path: Path) -> None:
    done = run_package("doctor", "--hostfile", str(tmp_path / "gone"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot be read" in done.stderr


def only(findings: object) -> Diagnosis:
    [finding] = list(findings)  # type: ignore[call-overload]
    assert finding.remedy or finding.level == "OK"
    return finding


def test_shared_memory_that_is_small_or_missing(tmp_path: Path) -> None:
    assert only(checks.check_shared_memory(tmp_path / "gone")).level == "FAIL"
    assert (
        only(checks.check_shared_memory(Path("/proc"))).level == "WARN"
    )  # no room at all


@pytest.mark.parametrize(
    ("limits", "level", "remedy"),
    [
        ((-1, -1), "OK", ""),
        ((1024, 4096), "OK", ""),
        ((64, 4096), "WARN", "run `ulimit -n 1024` before the job"),
        ((64, 64), "WARN", "/etc/security/limits.conf"),
    ],
)
def test_open_files(
    limits: tuple[int, int], level: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    finding = only(checks.check_open_files())
    assert finding.level == level
    assert remedy in finding.remedy


def test_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [resource.RLIM_INFINITY, resource.RLIM_INFINITY]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    assert only(checks.check_memlock()).finding == "unlimited"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    limits[0] = 64 << 10
    small = only(checks.check_memlock())
    assert (small.level, small.finding) == ("WARN", "64 KiB")


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "bitpipe"])
@pytest.mark.parametrize("extra_activations", [None, 3])
def test_arenas_are_as_large_as_a_run_opens(
    schedule: str, extra_activations: int | None
) -> None:
    from megatron_ext.runtime.connect import slots_of

    dynamic = (
        None
        if extra_activations is None
        else DynamicOrder(extra_activations=extra_activations)
    )
    pipeline = make_pipeline(schedule, 4, 16, dynamic=dynamic)
    message = 128 * 2 * 64 * 2
    num_peers = 1 if schedule == "bitpipe" else 2  # hosted by half of the ranks
    assert arena_bytes(pipeline, message) == num_peers * slots_of(pipeline) * message


@pytest.mark.parametrize(("samples", "level"), [(2, "OK"), (10**6, "FAIL")])
def test_the_memory_that_messages_take(samples: int, level: str) -> None:
    sizes = "--num-layers 4 --hidden-size 64 --seq-length 128 --micro-batch-size"
    flags = [
        *sizes.split(),
        f"{samples}",
        "--global-batch-size",
        f"{8 * samples}",
        "--bf16",
    ]
    flags += ["--pipeline-model-parallel-size", "4", "--pipeline-schedule", "zb-h1"]
    found = {
        f.check: f for f in check_training([*flags, "--pipeline-transport", "shm"])
    }
    assert found["training"].level == "OK"
    assert found["message buffers"].level == level
    assert found["message buffers"].remedy or level == "OK"
    assert "message buffers" not in {f.check for f in check_training(flags)}
