"""The fake libibverbs of csrc/tests/fake_verbs, built once for a session, and the /sys it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
NET_DEVICES = {0: "eth0", 1: "eth0", 3: "eth0", 4: "docker0"}
"""Network device by index in the GID table of its only port."""


def build_fake_verbs(folder: Path) -> Path:
    """Compile the fake libibverbs; skip the test if there is no compiler."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not there to build the fake libibverbs")
    library = folder / "libfake_verbs.so"
    sources = sorted(str(path) for path in (CSRC / "tests" / "fake_verbs").glob("*.cc"))
    options = ["-std=c++17", "-shared", "-fPIC", f"-I{CSRC}"]
    subprocess.run(
        [compiler, *options, *sources, "-o", str(library)], check=True, timeout=120
    )
    return library


def make_sysfs(folder: Path) -> Path:
    """Create the files in /sys for its device, fake0."""
    attributes = folder / "class" / "infiniband" / "fake0" / "ports" / "1" / "gid_attrs"
    for kind in ("types", "ndevs"):
        (attributes / kind).mkdir(parents=True)
    for index, net_device in NET_DEVICES.items():
        (attributes / "types" / str(index)).write_text("RoCE v2\n")
        (attributes / "ndevs" / str(index)).write_text(f"{net_device}\n")
    return folder
