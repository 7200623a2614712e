"""README and documentation name only what exists: files, flags, commands, variables, patches.

Standard library only, so that it can run anywhere; commands are asked for their help, not run.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import run_python, subcommands
from tests.ranks import require_training

REPO = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for pattern in (
        "*.md",
        "docs/*.md",
        "docs/*/*.md",
        "examples/*.md",
        "examples/*/*.md",
    )
    for path in REPO.glob(pattern)
)
IDS = [path.relative_to(REPO).as_posix() for path in DOCUMENTS]
OWN_FOLDERS = (
    "megatron_ext/",
    "csrc/",
    "examples/",
    "tests/",
    "docs/",
    "benchmarks/",
    ".ci/",
)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def tracked() -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=False
    )
    if listed.returncode == 0:
        return set(listed.stdout.split())
    return {
        path.relative_to(REPO).as_posix() for path in REPO.rglob("*") if path.is_file()
    }


def code_spans(text: str) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)


def blocks(text: str) -> list[str]:
    """The fenced blocks without a language: commands."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [block for language, block in fenced if not language]


def commands(text: str) -> list[list[str]]:
    """The command lines of a document as words, without comments and variables."""
    return [words for _, words in command_lines(text)]


def command_lines(text: str) -> list[tuple[dict[str, str], list[str]]]:
    """The command lines of a document: variables that they set, and words, without comments.

    Of tables with the heads "there" and "here" also those under "here".
    """
    found = []
    for block in [*blocks(text), *(line for row in moved(text) for line in row[1])]:
        for line in re.split(r"\n|&&", block.replace("\\\n", " ")):
            words = shlex.split(line, comments=True)
            variables = {}
            while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
                name, _, variables[name] = words.pop(0).partition("=")
            if words:
                found.append((variables, words))
    return found


def moved(text: str) -> list[tuple[str, list[str]]]:
    """First cells, and commands of the last ones, of the tables with the heads "there", "here"."""
    rows = []
    for table in re.findall(
        r"^\| there \| here \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", text, re.MULTILINE
    ):
        for row in table.splitlines():
            there, here = (cell.strip() for cell in row.strip("|").split(" | "))
            program = re.compile(r"([A-Z_0-9]+=\S+ )*(bash|megatron-ext|torchrun|pip) ")
            rows.append(
                (there, [span for span in code_spans(here) if program.match(span)])
            )
    return rows


def help_of(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_ext", *arguments, "--help"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return done.stdout


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    """The flags of the package's commands, of training without a tree and of the scripts."""
    from megatron_ext import cli

    require_training()
    texts = [help_of("pretrain_gpt.py")]
    texts += [text_of(REPO / file) for file in tracked() if file.endswith(".sh")]
    texts += [
        flag
        for file in tracked()
        if file.startswith(("tests/", "benchmarks/", "examples/"))
        and file.endswith(".py")
        for flag in re.findall(
            r"add(?:_argument)?\(\s*\"(--[a-z][\w-]+)\"", text_of(REPO / file)
        )
    ]
    parsers = [cli.build_parser()]
    while parsers:
        parser = parsers.pop()
        texts.append(parser.format_help())
        for action in parser._actions:
            parsers += (
                action.choices.values() if isinstance(action.choices, dict) else []
            )
    return set(re.findall(r"--[a-z][\w-]+", "\n".join(texts)))


REMOVED_FLAGS = {
    "--embedded",
    "--legacy-tokenizer",
    "--markdown",
    "--memory-gb",
    "--fbd-forward-device",
    "--kubernetes",
    "--push",
    "--slow-link",
    "--slow-rank",
    "--svg",
}
"""Flags of earlier versions, which only the changelog still names."""

# Of torchrun, pytest, slime, ms-swift, DPP's aggregate.py, and Megatron-LM in any release or on
# its dev branch.
FOREIGN_FLAGS = {
    "--benchmark_dir",
    "--custom-megatron-before-train-step-hook-path",
    "--custom-megatron-init-path",
    "--dynamic-context-parallel",
    "--external_plugins",
    "--measure",  # of pytest, by tests/conftest.py
    "--nproc-per-node",
    "--nproc_per_node",
    *(REPO / "tests" / "versions" / "considered_flags.txt").read_text().split(),
}


def test_the_documents_are_found() -> None:
    assert {
        "README.md",
        "CONTRIBUTING.md",
        "docs/patching.md",
        "examples/llama3/README.md",
    } <= set(IDS)


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_links_and_paths_exist(path: Path) -> None:
    text = text_of(path)
    files = tracked()
    folders = {parent.as_posix() for file in files for parent in Path(file).parents}
    missing = []
    for target in re.findall(
        r"\]\(([^)#\s]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", text
    ):
        link = next(filter(None, target))
        if (
            not link.startswith(("http:", "https:"))
            and not (path.parent / link).exists()
        ):
            missing.append(link)
    words = [word for span in code_spans(text) for word in span.split()]
    words += [word for command in commands(text) for word in command]
    for word in words:
        if word.startswith(OWN_FOLDERS) and "/out" not in word:
            plain = word.rstrip("/").rstrip(".,:")
            if plain not in files | folders:
                missing.append(word)
    assert not missing, f"{path.name} names what is not there: {missing}"


@pytest.mark.short_s(20)  # the first case waits for the help of every command
@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_flags_exist(path: Path, known_flags: set[str]) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text_of(path)))
    removed = REMOVED_FLAGS if path.name == "CHANGELOG.md" else set()
    assert named - known_flags - FOREIGN_FLAGS - removed == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_commands_exist(path: Path) -> None:
    files = tracked()
    for program, *rest in commands(text_of(path)):
        if program == "bash":
            assert rest[0] in files, rest
        elif program == "megatron-ext":
            assert rest[0] in subcommands(), rest
        elif program == "python":
            script = rest[1].replace(".", "/") + ".py" if rest[0] == "-m" else rest[0]
            assert script in files, rest
        elif program == "rsync":
            assert rest[0] == "-a", rest
        elif program == "pip":
            assert rest[0] == "install", rest
            assert rest[1] == "-e" or rest[1].startswith("megatron-ext"), rest
        elif program == "torchrun":
            named = [word for word in rest if word.endswith(".py")]
            with_us = "megatron_ext" in rest
            assert with_us or set(named) <= files, rest
        else:
            assert program.startswith(".venv/bin/") or program in {
                "for",
                "kubectl",
                "rsync",
            }, program


def test_every_command_of_other_repositories_has_its_place() -> None:
    rows = dict(moved(text_of(REPO / "docs/coming-from.md")))
    assert len(rows) == 21
    for theirs in (
        "aggregate.py",
        "prerequisite.sh",
        "setup.py install",
        "run_single.sh",
    ):
        assert any(theirs in there for there in rows), theirs
    assert sum(bool(ours) for ours in rows.values()) >= 17


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_variables_and_functions_exist(path: Path) -> None:
    import megatron_ext

    text = text_of(path)
    sources = "\n".join(
        text_of(REPO / file)
        for file in tracked()
        if file.endswith((".py", ".sh", ".toml", ".cc", "CMakeLists.txt"))
        and not file.startswith("tests/test_readme")
    )
    named = set(re.findall(r"\bMEGATRON_\w+\b", text))
    assert {name for name in named if name not in sources} == set()
    assert set(re.findall(r"megatron_ext\.(\w+)\(\)", text)) <= set(
        megatron_ext.__all__
    )


def test_the_page_of_patches_is_current() -> None:
    done = run_python(str(REPO / "website/patch_table.py"))
    page = "docs/reference/patches.md"
    remedy = f"run `python website/patch_table.py > {page}`"
    assert text_of(REPO / page) == done.stdout, remedy


@pytest.mark.short_s(8)  # nothing else looks at them
def test_the_table_of_features_is_current() -> None:
    [written] = re.findall(
        r"<!-- features: begin -->\n(.*)\n<!-- features: end -->",
        text_of(REPO / "docs/recipes.md"),
        re.DOTALL,
    )
    done = run_python(str(REPO / "website/recipe_tables.py"))
    assert written == done.stdout.strip(), (
        "copy what `python website/recipe_tables.py` prints"
    )


def test_the_page_of_refusals_is_current() -> None:
    done = run_python(str(REPO / "website/recipe_tables.py"), "refused")
    page = "docs/reference/refused.md"
    remedy = f"run `python website/recipe_tables.py refused > {page}`"
    assert text_of(REPO / page) == done.stdout, remedy


def test_the_picture_is_well_formed_and_follows_the_colour_scheme() -> None:
    from xml.etree import ElementTree as ET

    for path in (REPO / "docs/images").glob("*.svg"):
        ET.parse(path)
        assert "prefers-color-scheme: dark" in text_of(path)


def test_every_benchmark_has_its_place_among_the_results() -> None:
    results = text_of(REPO / "docs/results.md")
    for path in (REPO / "benchmarks").glob("*.py"):
        assert f"benchmarks/{path.name}" in results, path.name
    for file, anchor in re.findall(r"\]\(([\w-]+\.md)#([\w-]+)\)", results):
        heads = re.findall(r"^#+ (.*)$", text_of(REPO / "docs" / file), re.MULTILINE)
        assert anchor in {
            head.lower().replace(" ", "-").replace(",", "") for head in heads
        }, file
