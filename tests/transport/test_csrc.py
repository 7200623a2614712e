"""Builds and runs the C++ tests under sanitizers, and keeps foreign headers out."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from .build_tools import ENVIRONMENT, GENERATOR, needs_cmake

REPOSITORY = Path(__file__).parents[2]
# A build takes a minute of two idle cores, and many times that of busy ones.
_BUILD_TIMEOUT_S = 900
SOURCES = sorted(
    path for path in (REPOSITORY / "csrc").rglob("*") if path.suffix in {".cc", ".h"}
)


def execute(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=_BUILD_TIMEOUT_S,
        check=False,
    )


def run(*command: str) -> None:
    result = execute(list(command))
    assert result.returncode == 0, (
        f"{' '.join(command)}\n{result.stdout}{result.stderr}"
    )


def skip_without_runtime(sanitizers: str, scratch: Path) -> None:
    """Skips if not even an empty program can be built with the sanitizers, or none can start."""
    source, program = scratch / "empty.cc", scratch / "empty"
    source.write_text("int main() {}\n")
    compiler = os.environ.get("CXX", "c++")
    for command in (
        [compiler, f"-fsanitize={sanitizers}", str(source), "-o", str(program)],
        [str(program)],
    ):
        result = execute(command)
        if result.returncode != 0:
            pytest.skip(
                f"-fsanitize={sanitizers} does not work here: {result.stderr.strip()}"
            )


@needs_cmake
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_the_cxx_tests_pass(tmp_path, sanitizers):
    skip_without_runtime(sanitizers, tmp_path)
    build = str(tmp_path / "build")
    options = ["-DCMAKE_BUILD_TYPE=Debug", f"-DMEGATRON_EXT_SANITIZE={sanitizers}"]
    options += ["-DMEGATRON_EXT_BUILD_PYTHON=OFF", "-DMEGATRON_EXT_BUILD_TESTS=ON"]
    run("cmake", "-S", str(REPOSITORY), "-B", build, *GENERATOR, *options)
    run("cmake", "--build", build, "--parallel", "2")
    run("ctest", "--test-dir", build, "--output-on-failure", "--no-tests=error")


@needs_cmake
def test_an_unknown_sanitizer_is_refused(tmp_path):
    command = ["cmake", "-S", str(REPOSITORY), "-B", str(tmp_path), *GENERATOR]
    result = execute([*command, "-DMEGATRON_EXT_SANITIZE=memory"])
    assert result.returncode != 0
    assert "unknown sanitizer" in result.stderr


def test_every_cxx_test_is_built():
    listed = re.search(
        r"foreach\(name IN ITEMS ([\w\s]+)\)",
        (REPOSITORY / "CMakeLists.txt").read_text(),
    )
    tests = {
        path.stem.removeprefix("test_")
        for path in SOURCES
        if path.stem.startswith("test_")
    }
    assert listed is not None
    assert set(listed[1].split()) == tests


@pytest.mark.parametrize(
    "path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY))
)
def test_sources_are_free_of_foreign_headers(path):
    text = path.read_text(encoding="ascii")
    assert max(map(len, text.splitlines())) <= 100
    included = re.findall(r"#include [<\"](.*)[>\"]", text)
    foreign = re.compile(
        r"torch/|ATen/|c10/|cuda|musa|nccl|infiniband/|rdma/(rdma_cma|ib_)",
        re.IGNORECASE,
    )
    if (
        path.name != "test_verbs_abi.cc"
    ):  # which compares our declarations with a foreign header
        assert [name for name in included if foreign.match(name)] == []
    if not path.stem.startswith("bind"):
        assert [
            name for name in included if name.startswith(("pybind11/", "Python.h"))
        ] == []
