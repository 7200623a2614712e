"""Packaging of the native module: where it must be, may be missing, and what else is in a wheel."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from .build_tools import REPOSITORY, build_sdist, build_wheel, needs_cmake

pytest.importorskip("scikit_build_core", reason="the build backend is not installed")
pytest.importorskip("pybind11", reason="pybind11 is not installed")
pytest.importorskip("setuptools_scm", reason="setuptools-scm is not installed")
pytestmark = needs_cmake


@pytest.fixture(params=["configure", "compile"])
def broken_compiler(request, tmp_path):
    """A C++ compiler that always fails, or one that passes CMake's checks and fails at our code."""
    if request.param == "configure":
        return "/bin/false"
    real = os.environ.get("CXX", "c++")
    wrapper = tmp_path / "compiler"
    refusal = 'case "$*" in */csrc/*) echo refusing >&2; exit 1;; esac'
    wrapper.write_text(f'#!/bin/sh\n{refusal}\nexec {shlex.quote(real)} "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


@pytest.mark.short_s(4)
def test_without_a_compiler_the_package_installs_without_the_module(
    tmp_path, broken_compiler
):
    result = build_wheel(REPOSITORY, tmp_path / "out", CXX=broken_compiler)
    assert result.returncode == 0, result.stdout + result.stderr
    [wheel] = (tmp_path / "out").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "megatron_ext/transport/native.py" in names
    assert not [name for name in names if name.endswith(".so")]


def test_a_required_module_that_does_not_build_is_an_error(tmp_path, broken_compiler):
    result = build_wheel(
        REPOSITORY,
        tmp_path / "out",
        CXX=broken_compiler,
        MEGATRON_EXT_REQUIRE_NATIVE="1",
    )
    assert result.returncode != 0
    assert "CMake" in result.stdout + result.stderr
    assert not list(tmp_path.glob("out/*.whl"))


@pytest.mark.slow
def test_a_source_distribution_builds_a_complete_wheel(tmp_path):
    sdist = build_sdist(tmp_path / "sdist")
    result = build_wheel(sdist, tmp_path / "out", MEGATRON_EXT_REQUIRE_NATIVE="1")
    assert result.returncode == 0, result.stdout + result.stderr
    [wheel] = (tmp_path / "out").iterdir()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")

    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    package = {name for name in sources if name.startswith("megatron_ext/")}
    assert {
        "CMakeLists.txt",
        "LICENSE",
        "csrc/bind.cc",
        "megatron_ext/py.typed",
    } <= sources
    assert "megatron_ext/transport/_C.pyi" in package
    assert {Path(name).suffix for name in package} >= {".json", ".py", ".pyi", ".typed"}

    content = zipfile.ZipFile(wheel)
    files = {name for name in content.namelist() if ".dist-info/" not in name}
    assert files == package | {f"megatron_ext/transport/_C{suffix}"}
    assert any(
        name.endswith(".dist-info/licenses/LICENSE") for name in content.namelist()
    )

    content.extractall(tmp_path / "installed")
    assert flush_in(tmp_path / "installed") == "True"


def flush_in(site: Path) -> str:
    """Uses the native module of a package directory, in a Python without this environment's .pth
    files, which would find an editable installation first."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.path.append(sys.argv[2]); "
        "from megatron_ext.transport.native import require_native; _C = require_native(); "
        "assert _C.__file__.startswith(sys.argv[1]), _C.__file__; "
        "print(_C.Endpoint(0, 1, 1).flush(0))"
    )
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        code,
        str(site),
        sysconfig.get_path("purelib"),
    ]
    environment = {**os.environ, "MEGATRON_EXT_DISABLE": "1"}
    return subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()
