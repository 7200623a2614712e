from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_ext.transport
from megatron_ext.errors import TransportError
from megatron_ext.transport import native as native_loader


@pytest.fixture
def without_native(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron_ext.transport._C", None)


def test_a_missing_module_is_one_error_with_the_remedy(without_native):
    with pytest.raises(
        TransportError,
        match=r"_C is not usable: .*g\+\+.*MEGATRON_EXT_REQUIRE_NATIVE=1",
    ):
        native_loader.require_native()


def test_importing_the_transport_loads_neither_torch_nor_native_code():
    code = (
        "import sys, megatron_ext.transport.native; "
        "print([name for name in ('torch', 'megatron_ext.transport._C') if name in sys.modules])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MEGATRON_EXT_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.strip() == "[]"


def test_the_stub_lists_exactly_what_is_there(native):
    [stub] = (
        Path(path) / "_C.pyi"
        for path in megatron_ext.transport.__path__
        if (Path(path) / "_C.pyi").is_file()
    )
    body = ast.parse(stub.read_text()).body
    described = {
        node.name: {
            member.name for member in node.body if isinstance(member, ast.FunctionDef)
        }
        for node in body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }
    special = {"__init__", "__len__"}
    found = {
        name: {
            member
            for member in vars(value)
            if not member.startswith("_") or member in special
        }
        for name, value in vars(native).items()
        if not name.startswith("_") and isinstance(value, type)
    }
    # The buffer protocol is no attribute before Python 3.12, and pybind11 gives every class an
    # __init__, which refuses to be called.
    assert {name: members | {"__init__"} for name, members in found.items()} == {
        name: members - {"__buffer__"} | {"__init__"}
        for name, members in described.items()
    }
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    assert {
        name for name in vars(native) if not name.startswith("_")
    } == found.keys() | functions
