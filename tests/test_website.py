"""The documentation as a site: it builds, refuses what is broken, and its explorer shows `plan`."""

from __future__ import annotations

import argparse
import contextlib
import functools
import html
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.config.flags import add_arguments

from .commands import run_package, subcommands
from .test_readme import DOCUMENTS, REPO
from .tools.trace import browser

pytest.importorskip("zensical", reason="the generator of the site is not installed")


def build(repository: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(repository / "website/build.py")]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of what the site is made of."""
    copy = tmp_path / "repository"
    shutil.copytree(REPO / "website", copy / "website")
    shutil.copytree(REPO / "docs", copy / "docs")
    shutil.copytree(
        REPO / "examples", copy / "examples", ignore=shutil.ignore_patterns("out")
    )
    for path in (*REPO.glob("*.md"), REPO / "LICENSE", *REPO.glob("tests/*/README.md")):
        target = copy / path.relative_to(REPO)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return copy


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=str(folder)
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_every_page_has_its_place_on_the_site() -> None:
    listed = re.findall(
        r": (\S+\.md)$", (REPO / "website/mkdocs.yml").read_text(), re.MULTILINE
    )
    assert sorted(listed) == sorted(
        [
            "explorer.md",
            "reference.md",
            *(path.relative_to(REPO).as_posix() for path in DOCUMENTS),
        ]
    )


@pytest.mark.short_s(4)
def test_the_site_builds_and_its_explorer_shows_what_plan_says(
    repository: Path,
) -> None:
    done = build(repository)
    assert done.returncode == 0, done.stdout + done.stderr
    site = repository / "build/website/site"
    assert (site / "docs/images/schedules/bitpipe.svg").stat().st_size > 1000
    with served(site) as address:
        shown = subprocess.run(
            [
                browser.find(), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
                "--virtual-time-budget=5000", f"--user-data-dir={repository / 'profile'}",
                f"{address}/explorer/",
            ],
            capture_output=True, text=True, timeout=120, check=True,
        ).stdout  # fmt: skip
    explorer = html.unescape(shown.split('id="explorer"', 1)[1].split("</noscript>")[0])
    planned = json.loads(
        run_package("plan", "--pp", "4", "--microbatches", "8", "--json").stdout
    )
    names = [
        " ".join(
            [
                plan["schedule"],
                *(f"{k}={json.dumps(v)}" for k, v in plan["options"].items()),
            ]
        )
        for plan in planned
    ]
    drawn = re.findall(r'data-title="([^"]+)"', explorer)
    assert sorted(drawn) == sorted(name.replace('"', "") for name in names)
    best = planned[0]
    assert f"bubble {100 * best['bubble_ratio']:.1f} %" in explorer
    assert "--pipeline-model-parallel-size 4 --enable-bitpipe-schedule" in explorer


@pytest.mark.parametrize(
    "broken", ["[a](docs/nothing.md)", "[a](docs/planning.md#nothing)"]
)
def test_a_broken_link_ends_the_build(repository: Path, broken: str) -> None:
    with (repository / "README.md").open("a", encoding="utf-8") as file:
        file.write(f"\n{broken}\n")
    done = build(repository)
    assert done.returncode != 0
    assert "nothing" in re.sub(r"\x1b\[[\d;]*m", "", done.stderr)  # less its colours


def test_the_reference_has_every_flag_with_its_default(repository: Path) -> None:
    script = "import reference; print(reference.page())"
    page = subprocess.run(
        [sys.executable, "-c", script],
        cwd=repository / "website",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    parser = add_arguments(argparse.ArgumentParser(add_help=False))
    shown = (action for action in parser._actions if action.help != argparse.SUPPRESS)
    flags = [action.option_strings[0] for action in shown]
    training, *commands = page.split("## megatron-ext ")
    assert re.findall(r"^\| `(--[\w-]+)`", training, re.MULTILINE) == flags
    assert {command.split()[0] for command in commands} == subcommands()
    assert "| `--dpp-policy` `hint, breadth-first, depth-first` | hint |" in page
    assert "| `--dpp-extra-activations` `N` | 1 |" in page
    assert "| `--show` `RANKS` | 0,last |" in page
