"""Arming the real tables on the real Megatron: order, undoing, drift; each in a fresh process."""

from __future__ import annotations

import json
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.commands import run_package, run_python
from tests.ranks import run_ranks


def _output(code: str, **env: str) -> str:
    done = run_python("-c", code, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_imports_neither_torch_nor_megatron() -> None:
    code = "import sys, megatron_ext; print([m for m in ('torch', 'megatron') if m in sys.modules])"
    assert _output(code) == "[]"


def test_the_import_can_be_switched_off() -> None:
    code = (
        "import sys; before = list(sys.meta_path); import megatron_ext;"
        "print(sys.meta_path == before, 'wrapt' in sys.modules)"
    )
    assert _output(code, MEGATRON_EXT_DISABLE="1") == "True False"


def _foreign_objects_of_ours() -> list[str]:
    """Names in Megatron and torch, and in their classes, that are bound to objects of ours."""
    from megatron_ext.patches.point import PatchPoint

    def ours(value: object) -> bool:
        return type(value) is PatchPoint or str(
            getattr(value, "__module__", "")
        ).startswith("megatron_ext")

    found = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in {"megatron", "torch"} or module is None:
            continue
        if "megatron_ext" in str(getattr(module, "__file__", "")):
            continue  # served by our finder as a whole
        for attribute, value in list(vars(module).items()):
            if attribute.startswith("__"):
                continue
            if ours(value):
                found.append(f"{name}:{attribute}")
            if isinstance(value, type) and value.__module__ == name:
                found += [
                    f"{name}:{attribute}.{k}" for k, v in vars(value).items() if ours(v)
                ]
    return found


def _deactivate_everything() -> tuple[int, list[str], list[str], list[str]]:
    import wrapt

    import megatron_ext
    from megatron_ext.patches import listing
    from megatron_ext.patches.registry import REGISTRY

    listing.import_targets()
    armed = _foreign_objects_of_ours()
    sites = [site for site in REGISTRY._sites.values() if site.is_installed]
    originals = {site.target: site.original for site in sites}
    megatron_ext.deactivate()
    changed = []
    for target, original in originals.items():
        module, _, path = target.partition(":")
        try:
            current = wrapt.resolve_path(sys.modules[module], path)[2]
        except (
            AttributeError,
            ImportError,
        ):  # a name that we create; lazy modules raise their own
            current = None
        if current is not original and type(original) is not object:
            changed.append(target)
    left = _foreign_objects_of_ours()
    megatron_ext.activate()
    again = _foreign_objects_of_ours()
    # Modules that were imported while armed had copied replacements; once is enough. Arming again
    # is late: it reaches no modules of torch, and no copies of a name that is itself a copy.
    late = {
        name
        for name in armed
        if name.startswith("torch.") or name.endswith(":jit_fuser")
    }
    lost = sorted(set(armed) - set(again) - late)
    return len(originals), armed, left + changed, lost + sorted(set(again) - set(armed))


def test_deactivate_restores_every_original_of_megatron_and_torch() -> None:
    [(count, armed, left, difference)] = run_ranks(1, _deactivate_everything)
    assert count > 100
    assert len(armed) > 50
    assert left == []
    assert difference == []


def test_no_copy_of_a_patched_name_is_left_behind_when_armed_first() -> None:
    code = """
import megatron_ext
from megatron_ext.patches import listing
from megatron_ext.patches.registry import REGISTRY
import sys
listing.import_targets()
points = {r.target for r in REGISTRY.rows() if r.kind != "set"}
sites = [s for s in REGISTRY._sites.values() if s.is_installed]
originals = {id(s.original): s.target for s in sites if s.target in points}
print([f"{m}.{k}" for m, mod in list(sys.modules.items()) if m.startswith("megatron.") and mod
       for k, v in list(vars(mod).items()) if id(v) in originals])
"""
    assert _output(code) == "[]"


def test_arming_after_megatron_was_imported_mends_its_copies_and_says_so() -> None:
    code = """
import logging; logging.basicConfig()
import megatron.core.pipeline_parallel.schedules
import megatron.core.transformer.moe.token_dispatcher as user
import megatron_ext
from megatron_ext.patches.registry import REGISTRY
points = {r.target for r in REGISTRY.rows() if r.kind != "set"}
sites = [s for s in REGISTRY._sites.values() if s.is_installed]
originals = {id(s.original): s.target for s in sites if s.target in points}
import sys
print([f"{m}.{k}" for m, mod in list(sys.modules.items()) if m.startswith("megatron.") and mod
       for k, v in list(vars(mod).items()) if id(v) in originals])
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert "put `import megatron_ext` first" in done.stderr


def test_a_full_tree_on_pythonpath_brings_training_but_not_core(
    megatron_lm_path: Path,
) -> None:
    code = """
import megatron_ext, megatron.core, megatron.training, gpt_builders
print(megatron.core.__file__, megatron.training.__file__, gpt_builders.__file__, sep="\\n")
"""
    core, training, builders = _output(
        code, PYTHONPATH=str(megatron_lm_path)
    ).splitlines()[-3:]
    installed = metadata.distribution("megatron-core").locate_file(
        "megatron/core/__init__.py"
    )
    assert Path(core) == Path(str(installed))
    assert Path(training).is_relative_to(megatron_lm_path)
    assert Path(builders).is_relative_to(megatron_lm_path)


@pytest.fixture
def edited_core(tmp_path: Path) -> str:
    """A directory for PYTHONPATH that holds megatron-core with one function edited."""
    distribution = metadata.distribution("megatron-core")
    core = Path(str(distribution.locate_file("megatron/core")))
    copy = tmp_path / "site" / "megatron" / "core"
    shutil.copytree(
        core, copy, copy_function=os.symlink, ignore=shutil.ignore_patterns("*.pyc")
    )
    info = Path(
        str(distribution.locate_file(f"megatron_core-{distribution.version}.dist-info"))
    )
    shutil.copytree(info, tmp_path / "site" / info.name)
    edited = copy / "pipeline_parallel" / "p2p_communication.py"
    source = edited.read_text()
    edited.unlink()
    edited.write_text(
        source.replace("def _p2p_ops(\n    *,", "def _p2p_ops(\n    *,\n    more=0,")
    )
    assert edited.read_text() != source
    return str(tmp_path / "site")


def test_an_edited_upstream_function_is_reported_and_refused(edited_core: str) -> None:
    check = run_package("patches", "check", PYTHONPATH=edited_core)
    assert check.returncode == 1, check.stderr
    assert (
        "p2p_communication:_p2p_ops differs from the release: (*, more=0,"
        in check.stdout
    )
    code = """
import megatron_ext, megatron.core.pipeline_parallel.p2p_communication as p2p
from megatron_ext.patches.registry import REGISTRY
from megatron_ext.errors import UpstreamMismatch
for attempt in (REGISTRY.raise_mismatches, p2p._p2p_ops):
    try:
        attempt()
    except UpstreamMismatch as error:
        print(error)
"""
    lines = _output(code, PYTHONPATH=edited_core).splitlines()
    assert len(lines) == 2
    for line in lines:
        assert (
            "p2p_communication:_p2p_ops: expected signature (*, tensor_send_prev"
            in line
        )
        assert "megatron-core>=0.16.0,<0.21" in line


def test_every_patch_on_megatron_has_a_fingerprint() -> None:
    code = """
import json, megatron_ext
from megatron_ext.patches import drift
from megatron_ext.patches.registry import REGISTRY
targets = {r.target for r in REGISTRY.rows() if r.kind != "set" and r.state != "other release"}
print(json.dumps([t for t in sorted(targets)
                  if t.startswith("megatron.") and t not in drift._load()["targets"]]))
"""
    assert json.loads(_output(code)) == []
