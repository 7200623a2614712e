"""The time that `import megatron_ext` adds to `import megatron.core`.

    python benchmarks/import_time.py [--repeats N] [--json FILE]

Each import runs in a fresh interpreter; the kinds alternate, so other load affects all alike. On
devices other than CUDA the patches prevent Megatron from compiling its fused functions, and so from
importing torch's compiler, which takes longer than all the rest. The fair baseline there is
Megatron without the compiler, the second row. Reported are medians and their ratio, and the
difference of the minima, the figure least disturbed by other load.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.json_output import add_json, write_json

_NO_COMPILER = "import torch; torch.compile = lambda f=None, **_: f or (lambda g: g); "
_STATEMENTS = {
    "without": "import megatron.core",
    "without_compiler": _NO_COMPILER + "import megatron.core",
    "with": "import megatron_ext, megatron.core",
}
_CODE = "import time; begin = time.perf_counter(); {}; print(time.perf_counter() - begin)"


def measure_s(statement: str, device: str) -> float:
    """Return the seconds that a statement takes in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CODE.format(statement)],
        env={**os.environ, "PYTHONPATH": sys.path[0], "MEGATRON_EXT_DEVICE": device},
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11, help="imports of each kind")
    parser.add_argument("--device", default="auto", help="device backend that is armed")
    add_json(parser)
    args = parser.parse_args()

    measure_s(_STATEMENTS["with"], args.device)  # fills the caches of files and of bytecode
    times: dict[str, list[float]] = {name: [] for name in _STATEMENTS}
    for _ in range(args.repeats):
        for name, statement in _STATEMENTS.items():
            times[name].append(measure_s(statement, args.device))
    medians = {name: statistics.median(values) for name, values in times.items()}
    figures: dict[str, float] = {"repeats": args.repeats}
    for name, median_s in medians.items():
        figures[f"median_{name}_s"] = median_s
        print(f"import megatron.core, {name.replace('_', ' '):<20}{median_s:8.3f} s")
    for name in ("without", "without_compiler"):
        added_ms = 1e3 * (medians["with"] - medians[name])
        added_min_ms = 1e3 * (min(times["with"]) - min(times[name]))
        ratio = medians["with"] / medians[name]
        figures |= {f"ratio_to_{name}": ratio, f"added_to_{name}_ms": added_ms}
        print(
            f"compared with {name.replace('_', ' ')}: ratio {ratio:.3f}, added {added_ms:.0f} ms "
            f"(medians of {args.repeats}), {added_min_ms:.0f} ms (minima); bar: 100 ms"
        )
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
