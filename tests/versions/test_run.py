"""A release that was not tried never looks like one that was."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.upstream import releases
from tests.versions import table

REPO = Path(__file__).parents[2]
OTHER = "0.19.2" if releases.core_version() != "0.19.2" else "0.16.1"
"""A release that is not installed here."""
MINOR = OTHER.rpartition(".")[0].replace(".", "_")


OF_A_RUN = re.compile(
    r"CASES|TESTS|TESTS_IN|SKIP|LACKING|MEGATRON_LM_NEXT|(PYTHON|PYTHON_FOR|MEGATRON_LM_PATH)_\d+_\d+"
)
"""Settings of the `run.sh` that runs these tests, which are not those of the ones that they run."""


def _run(tmp_path: Path, version: str, **env: str) -> subprocess.CompletedProcess[str]:
    around = {
        name: value
        for name, value in os.environ.items()
        if not OF_A_RUN.fullmatch(name)
    }
    return subprocess.run(
        ["bash", "tests/versions/run.sh", version],
        env={**around, "VERSIONS_DIR": str(tmp_path), **env},
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_known_release_is_tried_by_default() -> None:
    written = (REPO / "tests" / "versions" / "run.sh").read_text()
    known = [releases.REFERENCES[one].version for one in releases.REFERENCES]
    main = {
        "0.20.0"
    }  # reviewed on a commit of main that says this version, before wheel and tag
    assert f"VERSIONS=({' '.join(one for one in known if one not in main)})" in written
    assert ("VERSIONS+=(main)" in written) == bool(main)


def test_main_is_a_tree_under_the_version_that_it_says(tmp_path: Path) -> None:
    done = _run(tmp_path, "main", MEGATRON_LM_NEXT="/absent")
    assert done.returncode == 2, done.stdout
    assert (
        "main is the tree that MEGATRON_LM_NEXT names, and /absent is none"
        in done.stderr
    )
    info = tmp_path / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text("MAJOR = 0\nMINOR = 31\nPATCH = 4\nPRE_RELEASE = ''\n")
    lacking = {"MEGATRON_LM_NEXT": str(tmp_path), "PYTHON_FOR_0_31": "/absent/python3"}
    done = _run(tmp_path, "main", **lacking)
    assert "0.31.4 has no Python here" in done.stderr


def test_without_a_python_for_it_a_release_fails(tmp_path: Path) -> None:
    done = _run(tmp_path, OTHER, **{f"PYTHON_FOR_{MINOR}": "/absent/python3"})
    assert done.returncode == 1, done.stdout
    assert f"{OTHER} has no Python here (tried /absent/python3)" in done.stderr
    assert f"name one: PYTHON_FOR_{MINOR}=PATH" in done.stderr
    assert "NOT TRIED" in done.stdout


def test_an_environment_with_another_release_fails(tmp_path: Path) -> None:
    done = _run(tmp_path, OTHER, **{f"PYTHON_{MINOR}": sys.executable})
    assert done.returncode == 1, done.stdout
    found = f"has megatron-core {releases.core_version()}, and {OTHER} is to be tried"
    assert found in done.stderr
    assert "NOT TRIED" in done.stdout


def test_an_unknown_case_fails(tmp_path: Path) -> None:
    version = str(releases.core_version())
    minor = version.rpartition(".")[0].replace(".", "_")
    env = {f"PYTHON_{minor}": sys.executable, "CASES": "zb-h1;abacus", "TESTS": "none"}
    done = _run(tmp_path, version, **env)
    assert done.returncode == 1, done.stdout
    assert "no case abacus; there are: 1f1b over shm; zb-h1" in done.stderr


def test_only_what_is_left_out_on_purpose_may_be_missing(tmp_path: Path) -> None:
    done = _run(tmp_path, OTHER, SKIP=OTHER)
    assert done.returncode == 0, done.stderr
    assert f"{OTHER} is left out, as SKIP says" in done.stdout
    assert "left out, as asked" in done.stdout


def test_without_a_python_for_it_a_release_may_be_left_out(tmp_path: Path) -> None:
    lacking = {f"PYTHON_FOR_{MINOR}": "/absent/python3"}
    done = _run(tmp_path, OTHER, LACKING="skip", **lacking)
    assert done.returncode == 0, done.stderr
    assert f"{OTHER} is left out: no Python here takes it" in done.stdout
    assert "left out, as asked" in done.stdout


ABOUT = {
    "version": "0.19.2",
    "python": "3.12.1",
    "torch": "2.13.0",
    "loop": "the wheel",
}
EQUAL = {
    "equal": True,
    "ours": ["| lm loss: 6.2E+00 |"],
    "theirs": ["| lm loss: 6.2E+00 |"],
}


@pytest.mark.parametrize(
    ("result", "code", "cell"),
    [
        (EQUAL, 0, "equal (6.2E+00)"),
        ({**EQUAL, "equal": False}, 1, "DIFFERS"),
        ({"error": "no loss was logged"}, 1, "FAILED"),
        ({"absent": "pretrain_bert.py"}, 0, "no pretrain_bert.py"),
    ],
)
def test_the_table_fails_where_a_cell_does(
    result: dict[str, object],
    code: int,
    cell: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps({**ABOUT, "zb-h1": result}))
    monkeypatch.setattr(sys, "argv", ["table", str(file)])
    assert table.main() == code
    assert cell in capsys.readouterr().out
