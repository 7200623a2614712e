"""Runs tests on the package with one piece of its text replaced.

    python -m tests.mutations.run_mutant NUMBER

The exit status is pytest's: 1 means that a test has failed. It is 2 if nothing was changed. Ranks
that tests start (`tests.ranks`) also run the changed code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType

import pytest

from tests.mutations.device_mutants import DEVICE_MUTANTS
from tests.mutations.mutants import MUTANTS, Mutant

_ROOT = Path(__file__).parents[2]
_VARIABLE = "MEGATRON_EXT_TEST_MUTANT"

ALL_MUTANTS = (*MUTANTS, *DEVICE_MUTANTS)


def path_of(mutant: Mutant) -> Path:
    """Return the file of the module that a mutant changes."""
    return _ROOT.joinpath(*mutant.module.split(".")).with_suffix(".py")


class _Loader(SourceFileLoader):
    """Compiles the changed text of a module."""

    def __init__(self, mutant: Mutant, path: Path) -> None:
        super().__init__(mutant.module, str(path))
        self._changed = path.read_text(encoding="utf-8").replace(
            mutant.text, mutant.instead
        )

    def get_code(self, fullname: str) -> CodeType:
        """Compile the changed text, without caching."""
        return compile(self._changed, self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    """Finds one module, before anything else does."""

    def __init__(self, mutant: Mutant) -> None:
        self._module = mutant.module
        self._loader = _Loader(mutant, path_of(mutant))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        """Return the changed module."""
        if fullname != self._module:
            return None
        return spec_from_file_location(fullname, self._loader.path, loader=self._loader)


def install_from_environment() -> None:
    """Change the package in processes started by a mutant's tests; do nothing in others."""
    number = os.environ.get(_VARIABLE)
    if number is not None:
        sys.meta_path.insert(0, _Finder(ALL_MUTANTS[int(number)]))


def main() -> int:
    """Run the tests of a mutant."""
    mutant = ALL_MUTANTS[int(sys.argv[1])]
    if path_of(mutant).read_text(encoding="utf-8").count(mutant.text) != 1:
        return _nothing_changed(f"{mutant.module} does not have {mutant.text!r} once")
    os.environ[_VARIABLE] = sys.argv[1]
    install_from_environment()
    quiet = ["-x", "-q", "--short", "-p", "no:cacheprovider", "-p", "no:randomly"]
    status = pytest.main([*quiet, *(str(_ROOT / test) for test in mutant.tests)])
    if mutant.module not in sys.modules:
        return _nothing_changed(f"its tests never import {mutant.module}")
    return int(status)


def _nothing_changed(why: str) -> int:
    print(f"run_mutant: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
