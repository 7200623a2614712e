"""Opens pages in a headless browser."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find() -> str:
    program = next((path for path in map(shutil.which, NAMES) if path), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    return program


def look(page: Path, script: str, *, dark: bool = False) -> dict[str, str]:
    """Open a page, run a script in it, and return the resulting `document.body.dataset`.

    Errors on the page raise an assertion error.
    """
    copy = page.with_name(f"looked-at-{page.name}")
    observer = (
        "addEventListener('error', e => { document.body.dataset.error = e.message; });"
    )
    text = page.read_text(encoding="utf-8")
    text = text.replace("<body>", f"<body><script>{observer}</script>", 1)
    text = text.replace("</body>", f"<script>{{{script}}}</script></body>", 1)
    copy.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [
            find(), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            "--virtual-time-budget=2000", "--window-size=1280,1000", "--dump-dom",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            f"--user-data-dir={page.parent / 'profile'}", copy.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not console, "\n".join(console)
    body = re.search(r"<body([^>]*)>", done.stdout)
    assert body is not None, done.stdout[:500]
    dataset = dict(re.findall(r'data-([\w-]+)="([^"]*)"', body[1]))
    assert "error" not in dataset, dataset["error"]
    return {name: html.unescape(value) for name, value in dataset.items()}
