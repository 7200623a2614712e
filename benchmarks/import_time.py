"""What `import megatron_ext` adds to `import megatron.core`.

    python benchmarks/import_time.py [--repeats N] [--json FILE]

Each import runs in a fresh interpreter; the two kinds alternate, so that whatever else the machine
does hits both alike. Reported are medians and their ratio, and the difference of the minima, which
is the figure least disturbed by others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_WITHOUT = "import megatron.core"
_WITH = "import megatron_ext, megatron.core"
_CODE = "import time; begin = time.perf_counter(); {statement}; print(time.perf_counter() - begin)"


def measure_s(statement: str, device: str) -> float:
    """Return the seconds that a statement takes in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CODE.format(statement=statement)],
        env={**os.environ, "PYTHONPATH": str(_ROOT), "MEGATRON_EXT_DEVICE": device},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11, help="imports of each kind")
    parser.add_argument("--device", default="auto", help="device backend that is armed")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()

    measure_s(_WITH, args.device)  # fills the caches of the file system and of bytecode
    times: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(args.repeats):
        times["without"].append(measure_s(_WITHOUT, args.device))
        times["with"].append(measure_s(_WITH, args.device))
    medians = {name: statistics.median(values) for name, values in times.items()}
    figures = {
        "repeats": args.repeats,
        "median_without_s": medians["without"],
        "median_with_s": medians["with"],
        "ratio": medians["with"] / medians["without"],
        "added_median_ms": 1e3 * (medians["with"] - medians["without"]),
        "added_min_ms": 1e3 * (min(times["with"]) - min(times["without"])),
    }
    print(f"{'import megatron.core':<36}{medians['without']:8.3f} s  (median of {args.repeats})")
    print(f"{'import megatron_ext, megatron.core':<36}{medians['with']:8.3f} s")
    print(
        f"ratio {figures['ratio']:.3f}; added {figures['added_median_ms']:.0f} ms (medians), "
        f"{figures['added_min_ms']:.0f} ms (minima); bar: 100 ms"
    )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
