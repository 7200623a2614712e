"""Run as a script: torch.distributed.pipelining writes its tables to a folder and reads ours back.

    python torch_tables.py FOLDER

It writes NAME.csv (computation) and NAME-comms.csv (with communication). If there are `ours-*.csv`,
torch's own loader loads and validates them, and they are written again as `back-*.csv`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

PP, NUM_MICROBATCHES = 4, 8
LOOP, V = (0, 4), (0, 7)  # stages on rank 0
MADE = {
    "Interleaved1F1B": LOOP,
    "LoopedBFS": LOOP,
    "InterleavedZeroBubble": LOOP,
    "ZBVZeroBubble": V,
    "DualPipeV": V,
}


def _schedule(
    name: str, stages: tuple[int, ...]
) -> torch_schedules.PipelineScheduleMulti:
    module, device = torch.nn.Identity(), torch.device("cpu")
    stages_of_torch = [PipelineStage(module, stage, 2 * PP, device) for stage in stages]
    return getattr(torch_schedules, name)(
        stages_of_torch, NUM_MICROBATCHES, lambda output, _: output.sum()
    )


def main() -> None:
    folder = Path(sys.argv[1])
    # One process stands for all ranks: it calculates every rank's table and sends nothing.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=PP)
    for name, stages in MADE.items():
        schedule = _schedule(f"Schedule{name}", stages)
        schedule._dump_csv(str(folder / f"{name}.csv"), "compute_only")
        schedule._dump_csv(str(folder / f"{name}-comms.csv"), "compute_comms")
    for path in sorted(folder.glob("ours-*.csv")):
        schedule = _schedule(
            "_PipelineScheduleRuntime", V if "-v" in path.stem else LOOP
        )
        schedule._load_csv(str(path), "compute_only")
        back = path.with_name(path.name.replace("ours-", "back-"))
        schedule._dump_csv(str(back), "compute_only")


if __name__ == "__main__":
    main()
