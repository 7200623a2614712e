"""Runs a function of a test module as several ranks that share the first GPU, or its stand-in.

Every rank is a fresh process, because a GPU cannot be used after a fork. Ranks rendezvous in the
directory of the run, where each leaves its result and its log. Collectives use gloo, because NCCL
rejects two ranks on one GPU.
"""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tests.fake_musa import build
from tests.fake_musa.queued import queued

REPO = Path(__file__).resolve().parents[2]

CHECKS = "MEGATRON_EXT_GPU_CHECKS"
"""Variable that run.sh sets: cuda, or emulated for the emulated device."""

EMULATED = os.environ.get(CHECKS) == "emulated"

TRANSFORMER_ENGINE = not EMULATED and find_spec("transformer_engine") is not None
"""Whether Transformer Engine's kernels can run."""

_ENVIRONMENT = {
    "MEGATRON_EXT_DEVICE": "musa" if EMULATED else "cuda",
    "LOCAL_RANK": "0",  # the index of the GPU
    "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",  # not used: the store is a file
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic matrix products
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # deterministic attention in Transformer Engine
    "NVTE_CPU_OFFLOAD_V1": "1",  # required by Megatron for offloading activations
    "PYTHONWARNINGS": "ignore",
}


def runtime() -> Any:
    """Return `torch.cuda`, or the emulated device's module with the same names."""
    return torch.musa if EMULATED else torch.cuda  # type: ignore[attr-defined]


def why_no_gpu() -> str | None:
    """Return why the checks cannot run here, or None."""
    if EMULATED:
        try:
            build.library()
        except build.NoCompiler as error:
            return f"the emulated device cannot be built: {error}"
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    # Not `torch.cuda.is_available`, which this package makes return True for Megatron even without
    # a GPU.
    if torch._C._cuda_getDeviceCount() < 1:
        return "torch sees no NVIDIA GPU"
    return None


def run(
    num_ranks: int,
    function: Callable[..., Any],
    *arguments: object,
    directory: Path,
    timeout_s: float = 240.0 if EMULATED else 90.0,
    **environment: str,
) -> list[Any]:
    """Call a function of a module in new processes; return its results by rank.

    Args:
        num_ranks: Number of processes.
        function: The function, which ranks look up by module and name.
        arguments: Arguments of the function, pickled like its results.
        directory: New directory for the files of this run.
        timeout_s: Time after which all processes are killed. The emulated device takes longer than
            a GPU.
        environment: Additional environment variables.

    Raises:
        AssertionError: A process failed or did not end; the message has the end of each log.
    """
    directory.mkdir(parents=True)
    (directory / "call").write_bytes(
        pickle.dumps((function.__module__, function.__name__, arguments))
    )
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    ranks = []
    for rank in range(num_ranks):
        rank_environment = {
            **os.environ, **_ENVIRONMENT, "PYTHONPATH": path, **_stand_in(path), "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), **environment,
        }  # fmt: skip
        ranks.append(_start(directory, rank, rank_environment))
    codes = _codes(ranks, timeout_s)
    if any(codes):
        tails = (_tail(directory / f"{rank}.log") for rank in range(num_ranks))
        raise AssertionError(f"exit codes {codes}\n" + "\n".join(tails))
    return [
        pickle.loads((directory / f"{rank}.result").read_bytes())
        for rank in range(num_ranks)
    ]


def _stand_in(path: str) -> dict[str, str]:
    """Return the emulated device's variables, with jitter to expose missing waits."""
    if not EMULATED:
        return {}
    variables = {
        **build.environment(devices=1),
        **queued(connections=1, jitter_us=100, seed=1),
    }
    variables["PYTHONPATH"] = os.pathsep.join([variables["PYTHONPATH"], path])
    return variables


def _start(
    directory: Path, rank: int, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.gpu.processes", str(directory)]
    with (directory / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=directory,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _codes(ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> list[int]:
    """Wait for all until one fails or the time is up; then kill the others."""
    deadline = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline:
            codes = [process.poll() for process in ranks]
            if None not in codes or any(codes):
                break
            time.sleep(0.1)
    finally:
        for process in ranks:
            process.kill()
    return [process.wait() for process in ranks]


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()[-40:]
    return f"{path.name}:\n" + "\n".join(lines)


@functools.cache
def store() -> torch.distributed.FileStore:
    """Return the store of this rank's run; only one, since torch deletes its file with the last."""
    return torch.distributed.FileStore("store", int(os.environ["WORLD_SIZE"]))


def join() -> None:
    """Create the default process group with gloo; the emulated MCCL accepts ranks of one device."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "mccl" if EMULATED else "gloo"
    torch.distributed.init_process_group(
        backend, store=store(), rank=rank, world_size=size
    )
    if not EMULATED:
        torch.distributed.ProcessGroup.allreduce = _allreduce
        # Gloo reduces a single GPU tensor, but not several in one call, which Megatron needs.
        torch.distributed.ProcessGroup.allreduce_coalesced = _allreduce_one_by_one


_of_gloo = torch.distributed.ProcessGroup.allreduce


class _Done:
    """Work of a group of one rank, which has nothing to do; gloo's work makes the host wait."""

    def wait(self) -> None:
        pass


def _allreduce(group: Any, tensors: list[torch.Tensor], options: Any) -> Any:
    return _Done() if group.size() == 1 else _of_gloo(group, tensors, options)


def _allreduce_one_by_one(group: Any, tensors: list[torch.Tensor], options: Any) -> Any:
    reduce_options = torch.distributed.AllreduceOptions()
    reduce_options.reduceOp = options.reduceOp
    *first, last = [group.allreduce([tensor], reduce_options) for tensor in tensors]
    for work in first:
        work.wait()
    return last


def _main() -> None:
    directory = Path(sys.argv[1])
    module, name, arguments = pickle.loads((directory / "call").read_bytes())
    result = getattr(importlib.import_module(module), name)(*arguments)
    (directory / f"{os.environ['RANK']}.result").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _main()
