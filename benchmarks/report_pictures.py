"""Takes the screenshots of the report in docs/tracing.md, from a real run.

    python benchmarks/report_pictures.py [--only-report DIR]        # about a minute, needs Chromium

It trains the tiny Llama 3 of the quick start on four ranks with --use-dpp and --trace, writes the
report and captures the top of the page in the light and the dark theme.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.tools.trace import browser

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
RUN = "data-1-pipeline-4-tensor-1-dpp-True"


def train(parent: Path) -> Path:
    """Run the quick start, traced; return the folder of the run."""
    directory = parent / RUN
    command = [
        "bash", str(ROOT / "examples/llama3/run.sh"), "--tiny", "--use-dpp",
        "--pipeline-model-parallel-size", "4", "--train-iters", "12",
        "--trace", "--trace-dir", str(directory), "--out", str(parent / "out"),
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=parent, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return directory


def photograph(page: Path, picture: Path, *, dark: bool) -> None:
    """Let a browser draw the top of a page."""
    with tempfile.TemporaryDirectory(prefix="megatron_ext_browser_") as profile:
        subprocess.run(
            [
                browser.find(), "--headless", "--no-sandbox", "--disable-gpu",
                "--window-size=1280,880", "--virtual-time-budget=2000",
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                f"--user-data-dir={profile}", f"--screenshot={picture}", page.as_uri(),
            ],
            check=True, timeout=120, stderr=subprocess.DEVNULL,
        )  # fmt: skip


def main() -> int:
    """Train, report, photograph."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only-report", type=Path, metavar="DIR", help="of a run that is there")
    args = parser.parse_args()
    if not any(map(shutil.which, browser.NAMES)):
        parser.error(f"there is no browser: none of {', '.join(browser.NAMES)}")
    with tempfile.TemporaryDirectory(prefix="megatron_ext_pictures_") as scratch:
        run = args.only_report or train(Path(scratch))
        page = Path(scratch) / "report.html"
        report = [sys.executable, "-m", "megatron_ext", "report", str(run), "-o", str(page)]
        subprocess.run(report, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        for name, dark in (("light", False), ("dark", True)):
            photograph(page, IMAGES / f"report-{name}.png", dark=dark)
    return 0


if __name__ == "__main__":
    sys.exit(main())
