"""Trains on two nodes in virtual machines, one run after the other.

    python guest_training.py FLAGS...

All runs share the FLAGS. Node N writes /mnt/RUN.N.log. On an emulated processor, the imports for a
training take minutes, so they are done once, and each training runs in a fork.
"""

from __future__ import annotations

import os
import sys
import traceback

_PIPELINE = (
    "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
    "--pipeline-schedule interleaved"
)
_TWO_ROLES = "--pipeline-model-parallel-size 1 --forward-backward-disaggregating"
RUNS = {
    "torch": f"{_PIPELINE} --pipeline-transport torch",
    "rdma": f"{_PIPELINE} --pipeline-transport rdma --trace --trace-dir /mnt/trace",
    "dynamic": f"{_PIPELINE} --pipeline-transport rdma --use-dpp",
    "disaggregated-tcp": f"{_TWO_ROLES} --pipeline-transport tcp",
    "disaggregated-rdma": f"{_TWO_ROLES} --pipeline-transport rdma",
}
"""Additional flags, by run."""
NODE = os.environ.get("NODE", "")
FIRST_PORT = 29500


def train(port: int, flags: list[str]) -> None:
    from megatron_ext.training import runner

    os.environ.update(
        RANK=NODE, WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="10.77.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="eth0",
    )  # fmt: skip
    sys.exit(runner.run("pretrain_gpt.py", flags))


def fork(run: str, port: int, flags: list[str]) -> int:
    """Train in a child, and return its exit status."""
    child = os.fork()
    if child == 0:
        log = os.open(f"/mnt/{run}.{NODE}.log", os.O_CREAT | os.O_WRONLY, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = 1
        try:
            train(port, [*flags, *RUNS[run].split()])
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> int:
    import megatron.core.pipeline_parallel  # noqa: F401

    for number, run in enumerate(RUNS):
        status = fork(run, FIRST_PORT + number, sys.argv[1:])
        if status != 0:
            print(f"the training {run} ended with status {status}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
