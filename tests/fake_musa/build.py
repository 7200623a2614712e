"""Builds the emulated device outside the tree, once per version of its sources and of torch."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_HERE = Path(__file__).parent
_SITE = _HERE / "site"
_TORCH = Path(torch.__file__).parent


class NoCompiler(Exception):
    """No C++ compiler was found to build the emulated device."""


def library(cache: Path | None = None) -> Path:
    """Return the compiled backend; concurrent processes build it only once.

    Args:
        cache: Directory for builds; default: a directory of this user in the system's temporary
            directory.

    Raises:
        NoCompiler: No C++ compiler is on PATH (or in CXX).
        RuntimeError: The compiler failed; the message is its output.
    """
    if cache is None:
        cache = Path(tempfile.gettempdir()) / f"megatron_ext_fake_musa_{os.getuid()}"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    built = cache / f"libfake_musa_{_key()}.so"
    if built.exists():
        return built
    with _lock(cache / "build.lock"):
        if not built.exists():
            _compile(built)
    return built


def environment(*, devices: int = 8, cache: Path | None = None) -> dict[str, str]:
    """Return the environment variables with which a process sees `devices` emulated devices.

    Builds the backend if necessary; raises the same errors as `library`.
    """
    path = os.pathsep.join(filter(None, [str(_SITE), os.environ.get("PYTHONPATH")]))
    return {
        "FAKE_MUSA_LIBRARY": str(library(cache)),
        "FAKE_MUSA_DEVICES": str(devices),
        "PYTHONPATH": path,
    }


def _sources() -> list[Path]:
    return sorted((_HERE / "csrc").iterdir())


def _key() -> str:
    digest = hashlib.sha256(torch.__version__.encode())
    for path in [*_sources(), Path(__file__)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _lock(path: Path):
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compiler() -> str:
    for name in filter(None, [os.environ.get("CXX"), "c++", "g++", "clang++"]):
        if compiler := shutil.which(name):
            return compiler
    raise NoCompiler("no C++ compiler (c++, g++, clang++ or CXX)")


def _compile(target: Path) -> None:
    part = target.with_suffix(".part")
    command = [
        _compiler(),
        "-std=c++20",  # required by torch's headers since 2.13
        "-O1",
        "-fPIC",
        "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-isystem{_TORCH / 'include'}",
        f"-isystem{_TORCH / 'include/torch/csrc/api/include'}",
        "-Wall",
        "-Wextra",
        "-Werror",
        str(_HERE / "csrc/backend.cc"),
        f"-L{_TORCH / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
        "-Wl,-soname,libmusart.so",  # so that opening the runtime's library finds this one
        f"-Wl,-rpath,{_TORCH / 'lib'}",
        "-o",
        str(part),
    ]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=600
    )
    if run.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{run.stderr[-8000:]}")
    part.replace(target)
