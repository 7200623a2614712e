"""Finds a training script's file and determines whether it belongs to Megatron-LM."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.upstream import releases
from megatron_ext.upstream import tree as upstream


def find_script(script: str) -> Path | None:
    """Return a script's file, given its path or its name in Megatron-LM.

    If there is no script and GPT runs with the wheel's training loop, the function returns None.

    Raises:
        UserError: The file does not exist, and neither a tree nor the wheel provides it.
        UpstreamMismatch: The tree's version differs from the installed megatron-core's.
    """
    path = Path(script)
    if path.is_file():
        resolved = path.resolve()
        # A script inside a tree runs with that tree, whatever MEGATRON_LM_PATH is set to.
        if upstream.is_tree(resolved.parent):
            upstream.check_tree(resolved.parent)
        return resolved
    tree = upstream.find_tree()
    if tree is not None:
        upstream.check_tree(tree)
        if (tree / script).is_file():
            return tree / script
    version = releases.core_version()
    release = releases.installed_release()
    is_without_bert = release is not None and release >= (0, 18)
    if script == "pretrain_bert.py" and is_without_bert:
        raise UserError(
            f"megatron-core {version} has no {script}; Megatron includes BERT only up to 0.17: pip "
            "install 'megatron-core>=0.16,<0.18', then `megatron-ext upstream fetch`"
        )
    if tree is not None:
        raise UserError(
            f"there is no {script}, neither here nor in the Megatron-LM tree {tree}"
            f"{_hint(path, tree)}"
        )
    if script != "pretrain_gpt.py":
        raise UserError(
            f"there is no {script} here{_hint(path)}; Megatron-LM's scripts need its tree: "
            f"{upstream.how_to_get()}"
        )
    if not releases.has_training():
        raise UserError(
            f"megatron-core {version} has no training loop; get a Megatron-LM tree with "
            f"{upstream.how_to_get()}; or use Python 3.12 or later and pip install "
            "'megatron-core>=0.17,<0.21', which contains a training loop"
        )
    return None


def is_megatrons(script: str) -> bool:
    """Return whether a script is one of Megatron-LM's own, which accept no other flags."""
    path = Path(script)
    if path.is_file():
        return upstream.is_tree(path.resolve().parent)
    # The script may be missing on this machine, because the job may run on another one.
    tree = upstream.find_tree()
    if path.name.startswith("pretrain_"):
        return True
    return tree is not None and (tree / script).is_file()


def is_pretraining(script: str) -> bool:
    """Return whether a script is one of Megatron-LM's training scripts, rather than a tool."""
    file_name = Path(script).name
    return file_name.startswith("pretrain_") and is_megatrons(script)


def _hint(script: Path, tree: Path | None = None) -> str:
    """Return a hint that names a similar script, or an empty string."""
    folders = [script.parent]
    if tree is not None:
        folders.append(tree)
    names = {"pretrain_gpt.py"}
    for folder in folders:
        if folder.is_dir():
            names |= {path.name for path in folder.glob("*.py")}
    alike = get_close_matches(script.name, sorted(names), n=1, cutoff=0.8)
    if not alike:
        return ""
    return f"; did you mean {alike[0]}?"
