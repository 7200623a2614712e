"""Takes the screenshots of the report in docs/tracing.md, from a real run.

    python website/report_pictures.py [--only-report DIR]        # about a minute, needs Chromium

It trains the tiny Llama 3 of the quick start on four ranks with --use-dpp and --trace, writes the
report, and captures the top of the page in the light and in the dark theme.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.tools.trace import browser  # noqa: E402


def main() -> None:
    """Train, write the report and take screenshots of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only-report", type=Path, metavar="DIR", help="use the traces in DIR"
    )
    args = parser.parse_args()
    if not any(map(shutil.which, browser.NAMES)):
        parser.error(f"there is no browser: none of {', '.join(browser.NAMES)}")
    with tempfile.TemporaryDirectory(prefix="megatron_ext_pictures_") as scratch:
        run, page = args.only_report, Path(scratch) / "report.html"
        if run is None:
            run = Path(scratch) / "data-1-pipeline-4-tensor-1-dpp-True"
            train = [
                "bash", str(ROOT / "examples/llama3/run.sh"), "--tiny", "--use-dpp",
                "--pipeline-model-parallel-size", "4", "--train-iters", "12",
                "--trace", "--trace-dir", str(run), "--out", f"{scratch}/out",
            ]  # fmt: skip
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run(train, check=True, cwd=scratch, env=environment)
        report = ["report", "--trace-dir", str(run), "-o", str(page)]
        command = [sys.executable, "-m", "megatron_ext", *report]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        for number, theme in enumerate(("dark", "light")):
            subprocess.run(
                [
                    browser.find(), "--headless", "--no-sandbox", "--disable-gpu",
                    "--window-size=1280,880", "--virtual-time-budget=2000",
                    f"--blink-settings=preferredColorScheme={number}",
                    f"--user-data-dir={scratch}/browser-{theme}",
                    f"--screenshot={ROOT}/docs/images/report-{theme}.png", page.as_uri(),
                ],
                check=True, timeout=120, stderr=subprocess.DEVNULL,
            )  # fmt: skip


if __name__ == "__main__":
    main()
