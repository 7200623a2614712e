"""Builds the documentation as a site: python website/build.py, into build/website/site.

Pages keep their paths, so links that work in the repository also work on the site. Other files that
a page links to are copied. A link to a missing file stays broken, which ends the build.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import reference

from megatron_ext.schedules.comparison import compare, figures, training_flags
from megatron_ext.schedules.drawing import palette, svg
from megatron_ext.schedules.table.costs import Costs

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "docs/*.md", "docs/*/*.md", "examples/*.md", "examples/*/*.md")
RANKS = (2, 4, 8)
MICROBATCHES_PER_RANK = (1, 2, 4)
LATENCIES = (0.0, 0.25)
SCHEMES = {"default": "light", "slate": "dark"}
"""The color schemes of the site, and the themes of the pictures that match them."""


def gather(target: Path) -> None:
    """Write all input files of the site generator to a new folder."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(REPOSITORY / "website/pages", target)
    pages = sorted(path for pattern in PAGES for path in REPOSITORY.glob(pattern))
    for path in _with_linked(pages):
        copy = target / path.relative_to(REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            copy.write_text(_with_titles(path), encoding="utf-8")
        else:
            shutil.copyfile(path, copy)
    (target / "reference.md").write_text(reference.page(), encoding="utf-8")
    with (target / "explorer.css").open("a", encoding="utf-8") as style:
        for scheme, theme in SCHEMES.items():
            selector = f'[data-md-color-scheme="{scheme}"] #explorer'
            style.write(
                f"{selector} {{ color-scheme: {theme}; {palette.variables(theme)} }}\n"
            )
    data, pictures = _explorer()
    folder = target / "explorer"
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(data), encoding="utf-8")
    for name, picture in pictures.items():
        (folder / name).write_text(picture, encoding="utf-8")


def _with_linked(pages: list[Path]) -> list[Path]:
    """Return the pages and all files of the repository that they link to, recursively."""
    found = list(pages)
    for page in found:  # The loop below appends to this list.
        if page.suffix != ".md":
            continue
        for target in re.findall(r"\]\(([^)#:\s]+)", page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            if path.is_file() and path.is_relative_to(REPOSITORY) and path not in found:
                found.append(path)
    return found


def _with_titles(page: Path) -> str:
    """Return a page in which links to other pages show titles instead of file names."""

    def titled(link: re.Match[str]) -> str:
        path = page.parent / link[1]
        if not path.is_file():
            return link[0]
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        return f"[{title}]({link[1]}{link[2]})"

    text = page.read_text(encoding="utf-8")
    return re.sub(r"\[[\w/-]+\.md\]\(([^)#:\s]+\.md)((?:#[^)\s]*)?)\)", titled, text)


def _explorer() -> tuple[list[dict[str, object]], dict[str, str]]:
    """Return the output of `megatron-ext plan` for a grid of sizes, and a picture per schedule."""
    data: list[dict[str, object]] = []
    pictures = {}
    for pp, factor, latency in itertools.product(
        RANKS, MICROBATCHES_PER_RANK, LATENCIES
    ):
        timelines, _ = compare("all", pp, pp * factor, Costs(1, 1, 1, latency=latency))
        for timeline in timelines:
            name = f"{len(pictures)}.svg"
            pictures[name] = svg.draw(timeline)
            data.append({
                **figures(timeline),
                "latency": latency,
                "flags": training_flags(timeline.schedule, timeline.costs),
                "picture": name,
            })  # fmt: skip
    return data, pictures


def main() -> int:
    """Build the site; return the exit code of its generator."""
    project = REPOSITORY / "build/website"
    gather(project / "pages")
    shutil.copy(REPOSITORY / "website/mkdocs.yml", project)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    return subprocess.run(command, cwd=project, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
