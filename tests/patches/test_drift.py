"""The drift guard: what counts as a change of an upstream function, and what does not."""

from __future__ import annotations

import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_ext.errors import UserError
from megatron_ext.patches import drift
from megatron_ext.patches.registry import Registry
from megatron_ext.upstream import releases

_BASE = '''
def f(a, b=1):
    """Say what."""
    total = a + b  # sum
    return f"{total:>{a}}"
'''


def _function(source: str, folder: Path) -> Any:
    path = folder / f"m{abs(hash(source))}.py"
    path.write_text(textwrap.dedent(source))
    module = ModuleType(path.stem)
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module.f


def _fingerprint(source: str, folder: Path) -> dict[str, str]:
    found = drift.fingerprint(_function(source, folder))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  # sum", ""),
        ('"""Say what."""', '"""Say something else, longer."""'),
        ('"""Say what."""', '"""Over\n    two lines."""'),
        ("    total", "\n    # why\n    total"),
        ("a + b", "a  +  b"),
    ],
)
def test_comments_docstrings_and_layout_do_not_count(
    old: str, new: str, tmp_path: Path
) -> None:
    changed = _BASE.replace(old, new)
    assert changed != _BASE
    assert _fingerprint(changed, tmp_path) == _fingerprint(_BASE, tmp_path)


_ANNOTATED = """
def f(a: int, *rest: Optional[list[int]], b: dict[str, int] = {"x": 1}, **c: Any) -> "int | None":
    total: int = a[1:2]
    return total
"""
_PLAIN = """
def f(a, *rest, b={"x": 1}, **c):
    total: int = a[1:2]
    return total
"""


def test_annotations_of_the_signature_do_not_count(tmp_path: Path) -> None:
    header = "from __future__ import annotations\nfrom typing import Any, Optional\n"
    plain = _fingerprint(header + _PLAIN, tmp_path)
    assert _fingerprint(header + _ANNOTATED, tmp_path) == plain
    assert plain["signature"] == "(a, *rest, b={'x': 1}, **c)"
    changed = _PLAIN.replace("a[1:2]", "a[1:3]")
    assert _fingerprint(header + changed, tmp_path) != plain


def test_every_minor_release_of_the_range_has_fingerprints() -> None:
    folder = Path(drift.__file__).with_name("fingerprints")
    known = [".".join(map(str, release)) for release in releases.REFERENCES]
    assert sorted(path.stem for path in folder.iterdir()) == known


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a + b", "a - b"),
        ("b=1", "b=2"),
        (":>", ":<"),
        ("return f", "return"),
        ("{total", "{a"),
    ],
)
def test_any_token_that_means_something_counts(
    old: str, new: str, tmp_path: Path
) -> None:
    changed = _BASE.replace(old, new)
    assert changed != _BASE
    assert (
        _fingerprint(changed, tmp_path)["sha256"]
        != _fingerprint(_BASE, tmp_path)["sha256"]
    )


def test_a_fingerprint_is_the_same_on_every_python(tmp_path: Path) -> None:
    # Python 3.10 to 3.13 were seen to agree, on this and on all functions of Megatron 0.19.
    expected = "cd3599fb1d258b8b6c77c7173539f51a"
    assert _fingerprint(_BASE, tmp_path)["sha256"][:32] == expected


def test_builtins_have_no_fingerprint() -> None:
    assert drift.fingerprint(len) is None


def test_the_policy_takes_three_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_EXT_DRIFT", "maybe")
    with pytest.raises(UserError, match="error, warn or ignore"):
        drift.policy()
    with pytest.raises(UserError, match="error, warn or ignore"):
        Registry().raise_mismatches()  # though nothing differs
    monkeypatch.setenv("MEGATRON_EXT_DRIFT", "")  # as scripts unset it
    assert drift.policy() == "error"


def test_the_remedy_is_for_where_the_target_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(drift.tree, "find_tree", lambda: tmp_path)
    # Forced, because pip leaves a version of the range as it is.
    pip = "with pip install --force-reinstall --no-deps 'megatron-core>=0.16.0,<0.21'"
    # Not all users can reinstall: the change may be their own.
    warn = (
        "; or, if you made the change, set MEGATRON_EXT_DRIFT=warn to log whether your code "
        "still runs."
    )
    place, tag = "megatron.core.a:f", releases.reference().tag
    assert str(drift.missing(place, "no f")).endswith(
        f"{pip}."
    )  # no patch acts without a target
    for target, remedy in (
        (place, pip),
        ("megatron.training.a:f", f"of Megatron-LM at {tag}"),
    ):
        assert str(drift._mismatch(target, "(a)", "(b)")).endswith(remedy + warn)
