"""The wheel that is published: what README's quick start without a clone installs and runs.

`MEGATRON_EXT_WHEEL` names a wheel to be tested; without it one is built from the source package.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from megatron_ext.upstream.releases import has_training

from .transport.build_tools import REPOSITORY, build_sdist, build_wheel

NEEDED = ("scikit_build_core", "pybind11", "setuptools_scm")


def needs_builder() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} to build a package")


def run(command: list[str], cwd: Path, **env: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("MEGATRON_EXT_WHEEL")
    if given:
        return Path(given).resolve(strict=True)
    needs_builder()
    sdist = build_sdist(tmp_path_factory.mktemp("sdist"))
    out = tmp_path_factory.mktemp("wheel")
    result = build_wheel(sdist, out, MEGATRON_EXT_REQUIRE_NATIVE="1")
    assert result.returncode == 0, result.stdout + result.stderr
    [built] = out.iterdir()
    return built


def quick_start() -> list[str]:
    """The command that README gives to those who do not clone."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    block = text.split("pip install 'megatron-ext[upstream]'\n", 1)[1].split("```", 1)[
        0
    ]
    return shlex.split(block.replace("\\\n", " "))


@pytest.mark.slow
def test_the_wheel_brings_one_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        folders = {name.split("/")[0] for name in files.namelist()}
    assert {name for name in folders if not name.endswith(".dist-info")} == {
        "megatron_ext"
    }


@pytest.mark.slow
def test_the_wheel_trains_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    if not has_training():
        pytest.skip("the wheel of this megatron-core has no training loop")
    home = tmp_path / "environment"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    # Only then the packages of this environment, of which pip must not find this package's own.
    run(
        [
            str(python),
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-index",
            str(wheel),
        ],
        tmp_path,
    )
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"  # Debian's Python has two
    site = Path(run([str(python), "-c", where], tmp_path).strip())
    (site / "torch_and_megatron.pth").write_text(sysconfig.get_path("purelib"))
    # The launcher needs these commands, but no compiler.
    for name in ("env", "sh", "bash", "cat", "mkdir", "hostname"):
        program = shutil.which(name)
        if program is not None:
            (home / "bin" / name).symlink_to(program)
    path = str(home / "bin")
    assert not [
        name
        for name in ("cc", "c++", "g++", "gcc", "clang")
        if shutil.which(name, path=path)
    ]
    clean = {
        "PATH": path,
        "PYTHONPATH": "",
        "CXX": "/bin/false",
        "CC": "/bin/false",
        "TMPDIR": str(tmp_path),
    }
    code = (
        "from megatron_ext.transport.native import require_native; "
        "print(require_native().__file__)"
    )
    native = run([str(python), "-c", code], tmp_path, MEGATRON_EXT_DISABLE="1", **clean)
    assert native.startswith(str(site))
    shown = run([str(home / "bin" / "megatron-ext"), "--version"], tmp_path, **clean)
    assert shown.split()[1] == wheel.name.split("-")[1]

    entry, *arguments = quick_start()
    command = [str(home / "bin" / entry), *arguments]
    runs = {"HOME": str(tmp_path), "MEGATRON_EXT_RUNS": str(tmp_path / "runs")}
    trained = run(command, tmp_path, OMP_NUM_THREADS="1", **runs, **clean)
    losses = [
        float(each) for each in re.findall(r"iteration +\d+/\d+ +loss (\S+)", trained)
    ]
    assert len(losses) >= 2, trained[-4000:]
    assert losses[-1] < losses[0]
    assert "messages over shm" in trained


@pytest.mark.slow
def test_the_version_is_that_of_the_tag(tmp_path: Path) -> None:
    needs_builder()
    clone = tmp_path / "repository"
    if subprocess.run(
        ["git", "-C", REPOSITORY, "rev-parse", "HEAD"], capture_output=True
    ).returncode:
        pytest.skip("needs a git checkout")
    (clone / "megatron_ext").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "megatron_ext/__init__.py"):
        shutil.copy(REPOSITORY / name, clone / name)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["commit", "-qm", "one"],
        ["tag", "v7.8.9"],
    ):
        run([*git, *words], clone)
    assert build_sdist(tmp_path / "of-a-tag", clone).name == "megatron_ext-7.8.9.tar.gz"
    run([*git, "commit", "-q", "--allow-empty", "-m", "two"], clone)
    assert build_sdist(tmp_path / "after-it", clone).name.startswith(
        "megatron_ext-7.8.10.dev1+g"
    )
    shutil.rmtree(clone / ".git")
    assert (
        build_sdist(tmp_path / "without-git", clone).name == "megatron_ext-0.0.0.tar.gz"
    )
