"""The registry on a made-up upstream package, each test with a registry of its own."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import PatchConflict, UpstreamMismatch
from megatron_ext.patches import drift
from megatron_ext.patches.point import PatchPoint
from megatron_ext.patches.registry import Patch, Registry

_SOURCE = '''
LIMIT = 3


def add(a, b=1):
    """Add."""
    return a + b


class Base:
    def inherited(self):
        return "inherited"


class Box(Base):
    def __init__(self, value):
        self.value = value

    def get(self, plus=0):
        return self.value + plus

    @staticmethod
    def double(x):
        return 2 * x

    @classmethod
    def make(cls, value):
        return cls(value)
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An importable package with a defining module and one that copies its names."""
    name = "fake_upstream"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "core.py").write_text(_SOURCE)
    (folder / "user.py").write_text("from fake_upstream.core import add as plus, Box, LIMIT\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        del sys.modules[module]


@pytest.fixture
def registry() -> Iterator[Registry]:
    made = Registry()
    yield made
    made.deactivate()


def _load(name: str) -> ModuleType:
    return importlib.import_module(f"fake_upstream.{name}")


def _tag(label: str) -> Callable[..., Any]:
    def fn(call: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return (label, call(*args, **kwargs))

    return fn


def _patch(target: str, label: str = "x", **options: Any) -> Patch:
    options.setdefault("fn", _tag(label))
    return Patch(id=label, target=f"fake_upstream.core:{target}", reason="a test", **options)


def test_a_patch_waits_for_its_module_and_reaches_every_copy(
    package: str, registry: Registry
) -> None:
    registry.register([_patch("add")])
    registry.activate()
    assert [row.state for row in registry.rows()] == ["pending"]
    assert _load("user").plus(1) == ("x", 2)
    assert [row.state for row in registry.rows()] == ["installed"]


def test_arming_late_mends_renamed_copies_by_identity(
    package: str, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    user = _load("user")
    user.unrelated = add = lambda a, b=1: "mine"
    registry.register([_patch("add")])
    registry.activate()
    assert user.plus(1) == ("x", 2)
    assert user.unrelated is add


def test_setting_a_copied_name_changes_that_copy_alone(package: str, registry: Registry) -> None:
    user, core = _load("user"), _load("core")
    core.nothing = None
    add = core.add
    patch = Patch(
        id="x", target="fake_upstream.user:plus", reason="-", kind="set", fn=lambda old: None
    )
    registry.register([patch])
    registry.activate()
    assert user.plus is None
    assert core.add is add
    registry.deactivate()
    assert user.plus is add
    assert core.nothing is None


def test_deactivate_restores_every_original(package: str, registry: Registry) -> None:
    user, core = _load("user"), _load("core")
    names = {
        "add": core.add,
        "Box.get": vars(core.Box)["get"],
        "Box.double": vars(core.Box)["double"],
        "Box.make": vars(core.Box)["make"],
    }
    registry.register([_patch(name, label=name) for name in names])
    registry.register(
        [
            _patch("LIMIT", label="limit", kind="set", fn=lambda old: old + 4),
            _patch("EXTRA", label="extra", kind="set", fn=lambda old: old, creates=True),
            _patch("Box.extra", label="attr", kind="set", fn=lambda old: 5, creates=True),
        ]
    )
    registry.activate()
    assert core.LIMIT == 7
    assert core.EXTRA is None
    assert core.Box.extra == 5
    assert core.Box(2).get(plus=1) == ("Box.get", 3)
    assert core.Box.double(4) == ("Box.double", 8)
    assert core.Box.make(4)[1].value == 4
    registry.deactivate()
    assert core.add is names["add"]
    assert user.plus is names["add"]
    for name in ("get", "double", "make"):
        assert vars(core.Box)[name] is names[f"Box.{name}"]
    assert core.LIMIT == 3
    assert not hasattr(core, "EXTRA")
    assert not hasattr(core.Box, "extra")


def test_copies_of_a_replacement_in_classes_are_restored_too(
    package: str, registry: Registry
) -> None:
    core = _load("core")
    original = core.add
    registry.register([_patch("add")])
    registry.activate()
    user = _load("user")
    user.Keeper = type(
        "Keeper", (), {"__module__": user.__name__, "f": core.add, "g": staticmethod(core.add)}
    )
    registry.deactivate()
    assert vars(user.Keeper)["f"] is original
    assert user.Keeper.g is original


def test_copies_out_of_reach_act_like_the_original_once_inactive(
    package: str, registry: Registry
) -> None:
    registry.register([_patch("add")])
    registry.activate()
    kept = {"closure": _load("core").add}
    registry.deactivate()
    assert kept["closure"](1) == 2


def test_activate_and_deactivate_can_be_repeated(package: str, registry: Registry) -> None:
    core = _load("core")
    registry.register([_patch("add")])
    for _ in range(3):
        registry.activate()
        registry.activate()
        assert core.add(1) == ("x", 2)
        registry.deactivate()
        registry.deactivate()
        assert core.add(1) == 2


def test_a_module_imported_while_inactive_is_patched_on_the_next_activation(
    package: str, registry: Registry
) -> None:
    registry.register([_patch("add")])
    registry.activate()
    registry.deactivate()
    assert _load("core").add(1) == 2
    registry.activate()
    assert _load("core").add(1) == ("x", 2)


def test_the_chain_is_chosen_at_each_call(package: str, registry: Registry) -> None:
    on = {"a": True, "r": False}
    registry.register(
        [
            _patch("add", label="a", when=lambda: on["a"]),
            _patch(
                "add", label="r", kind="replace", when=lambda: on["r"], fn=lambda *_: "replaced"
            ),
        ]
    )
    registry.activate()
    add = _load("core").add
    assert add(1) == ("a", 2)
    on["r"] = True
    assert add(1) == ("a", "replaced")
    on["a"] = False
    assert add(1) == "replaced"
    on["r"] = False
    assert add(1) == 2


@given(
    st.lists(
        st.tuples(st.integers(-2, 2), st.booleans()), min_size=1, max_size=6, unique_by=lambda t: t
    )
)
def test_wraps_run_by_order_then_id_and_only_the_active(wraps: list[tuple[int, bool]]) -> None:
    module = ModuleType("fake_chain")
    module.f = lambda: ()
    sys.modules["fake_chain"] = module

    def wrap(label: str) -> Callable[..., Any]:
        return lambda call, instance, args, kwargs: (label, *call(*args, **kwargs))

    registry = Registry()
    ids = [f"{index:02d}" for index in range(len(wraps))]
    registry.register(
        Patch(
            id=i, target="fake_chain:f", reason="-", fn=wrap(i), order=order, when=lambda on=on: on
        )
        for i, (order, on) in zip(ids, wraps, strict=True)
    )
    registry.activate()
    try:
        expected = sorted((order, i) for i, (order, on) in zip(ids, wraps, strict=True) if on)
        assert module.f() == tuple(i for _, i in expected)
    finally:
        registry.deactivate()
        del sys.modules["fake_chain"]


def test_two_active_replacements_are_a_conflict_that_names_both(
    package: str, registry: Registry
) -> None:
    registry.register([_patch("add", label=i, kind="replace") for i in ("first", "second")])
    registry.activate()
    with pytest.raises(PatchConflict, match=r"first, second"):
        _load("core").add(1)


def test_declared_conflicts_are_refused_only_when_both_are_active(
    package: str, registry: Registry
) -> None:
    on = {"b": False}
    registry.register(
        [
            _patch("add", label="a", conflicts=("b",)),
            _patch("add", label="b", when=lambda: on["b"]),
        ]
    )
    registry.activate()
    assert _load("core").add(1) == ("a", 2)
    on["b"] = True
    with pytest.raises(PatchConflict, match="a cannot be active together with b"):
        _load("core").add(1)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (_patch("Box.get", label="x"), "id x is taken"),
        (_patch("add", label="y", kind="set", fn=lambda old: old), "needs the target to itself"),
        (_patch("Box.get", label="y", requires=("nowhere",)), "unknown patches"),
    ],
)
def test_mistakes_in_tables_are_refused(registry: Registry, second: Patch, message: str) -> None:
    registry.register([_patch("add")])
    with pytest.raises(ValueError, match=message):
        registry.register([second])


def test_a_missing_target_never_breaks_the_import_but_refuses_the_run(
    package: str, registry: Registry
) -> None:
    registry.register([_patch("gone"), _patch("Box.gone", label="y", when=lambda: False)])
    registry.activate()
    assert _load("core").add(1) == 2
    assert [row.state for row in registry.rows()] == ["refused", "absent"]
    with pytest.raises(UpstreamMismatch) as caught:
        registry.raise_mismatches()
    assert caught.value.target == "fake_upstream.core:gone"
    assert caught.value.found.startswith("nothing")


def test_a_missing_target_of_an_idle_patch_is_no_error(package: str, registry: Registry) -> None:
    registry.register([_patch("gone", when=lambda: False)])
    registry.activate()
    _load("core")
    registry.raise_mismatches()


def _pin(monkeypatch: pytest.MonkeyPatch, original: Any, **changes: str) -> None:
    entry = {**drift.fingerprint(original), **changes}  # type: ignore[dict-item]
    pin = {"version": "0", "files": {}, "targets": {"fake_upstream.core:add": entry}}
    monkeypatch.setattr(drift, "_load", lambda: pin)


def test_an_edited_function_is_refused_at_the_call(
    package: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = _load("core")
    _pin(monkeypatch, core.add, sha256="0" * 64)
    registry.register([_patch("add")])
    registry.activate()
    assert "edited" in registry.rows()[0].drift
    with pytest.raises(UpstreamMismatch, match=r"fake_upstream\.core:add: expected source 0000"):
        core.add(1)
    monkeypatch.setenv("MEGATRON_EXT_DRIFT", "warn")
    assert core.add(1) == ("x", 2)


def test_a_changed_signature_is_told_as_such(
    package: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pin(monkeypatch, _load("core").add, sha256="0" * 64, signature="(a)")
    registry.register([_patch("add")])
    registry.activate()
    with pytest.raises(UpstreamMismatch, match=r"expected signature \(a\), found \(a, b=1\)"):
        registry.raise_mismatches()


def test_an_equal_function_is_not_refused(
    package: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pin(monkeypatch, _load("core").add)
    registry.register([_patch("add")])
    registry.activate()
    registry.raise_mismatches()
    assert _load("core").add(1) == ("x", 2)


def test_overwriting_by_others_is_seen_and_left_alone(package: str, registry: Registry) -> None:
    core = _load("core")
    registry.register([_patch("add"), _patch("LIMIT", label="l", kind="set", fn=lambda old: 9)])
    registry.activate()
    core.add, core.LIMIT = mine = (lambda a: "mine"), 11
    assert [row.intact for row in registry.rows()] == [False, False]
    registry.deactivate()
    assert (core.add, core.LIMIT) == mine


def test_a_removed_patch_is_undone(package: str, registry: Registry) -> None:
    core = _load("core")
    registry.register([_patch("add", label="a"), _patch("add", label="b")])
    registry.activate()
    registry.remove(["a"])
    assert core.add(1) == ("b", 2)
    registry.remove(["b"])
    assert core.add(1) == 2
    assert registry.rows() == []


def test_patch_points_survive_copy_deepcopy_and_pickle(package: str, registry: Registry) -> None:
    registry.register([_patch("add")])
    registry.activate()
    point = _load("core").add
    assert isinstance(point, PatchPoint)
    assert copy.copy(point) is point
    assert copy.deepcopy({"f": point})["f"] is point
    assert pickle.loads(pickle.dumps(point)) is point


def test_deactivated_is_a_block(package: str, registry: Registry) -> None:
    core = _load("core")
    registry.register([_patch("add")])
    registry.activate()
    with registry.deactivated():
        assert core.add(1) == 2
    assert core.add(1) == ("x", 2)


# -- releases ----------------------------------------------------------------------------------


def _variants() -> list[Patch]:
    return [
        _patch("add", label="a", until="0.17"),
        _patch("Box.get", label="a", since="0.17", until="0.19"),
        _patch("Box.double", label="a", since="0.19"),
    ]


@pytest.mark.parametrize(
    ("release", "place"), [((0, 16), "add"), ((0, 18), "Box.get"), ((0, 19), "Box.double")]
)
def test_of_rows_that_share_an_id_that_for_the_release_acts(
    package: str, release: tuple[int, int], place: str
) -> None:
    registry = Registry(release)
    registry.register(_variants())
    registry.activate()
    core = _load("core")
    try:
        patched = {
            "add": core.add(1) == ("a", 2),
            "Box.get": core.Box(2).get() == ("a", 2),
            "Box.double": core.Box.double(1) == ("a", 2),
        }
        states = {row.target.partition(":")[2]: row.state for row in registry.rows()}
    finally:
        registry.deactivate()
    assert [name for name, acts in patched.items() if acts] == [place]
    assert states == {n: "installed" if n == place else "other release" for n in patched}


def test_rows_for_one_release_may_not_share_an_id(registry: Registry) -> None:
    registry.register([_patch("add", until="0.18")])
    with pytest.raises(ValueError, match=r"id x is taken by fake_upstream\.core:add"):
        registry.register([_patch("Box.get", since="0.17")])
    registry.register([_patch("Box.get", since="0.18")])


def test_a_convenience_may_be_absent(package: str, registry: Registry) -> None:
    registry.register([_patch("gone", required=False)])
    registry.activate()
    _load("core")
    assert [row.state for row in registry.rows()] == ["absent"]
    registry.raise_mismatches()


def test_a_module_that_is_gone_refuses_the_run_where_its_patch_would_act(
    package: str, registry: Registry
) -> None:
    wanted = {"x": False}
    patch = Patch(
        id="x",
        target="fake_upstream.gone:f",
        reason="-",
        fn=_tag("x"),
        when=lambda: wanted["x"],
    )
    registry.register([patch])
    registry.activate()
    registry.raise_mismatches()  # the package is not there either, so nothing is known
    _load("core")
    registry.raise_mismatches()
    wanted["x"] = True
    with pytest.raises(UpstreamMismatch, match="fake_upstream has no such module"):
        registry.raise_mismatches()


def test_drift_that_is_allowed_is_one_line_on_one_rank(
    package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEGATRON_EXT_DRIFT", "warn")
    _pin(monkeypatch, _load("core").add, sha256="0" * 64)
    for rank, lines in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        registry = Registry()
        registry.register([_patch("add"), _patch("add", label="y")])
        registry.activate()
        registry.raise_mismatches()
        registry.raise_mismatches()
        registry.deactivate()
        told = [r for r in caplog.records if "MEGATRON_EXT_DRIFT=warn" in r.getMessage()]
        assert len(told) == lines
    assert "fake_upstream.core:add has source" in told[0].getMessage()


def test_a_release_newer_than_all_known_runs_where_everything_fits(
    package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "0")
    core = _load("core")
    registry = Registry((0, 20))
    idle = {"idle": False}
    registry.register([_patch("add"), _patch("gone", label="y", when=lambda: idle["idle"])])
    _pin(monkeypatch, core.add)
    registry.activate()
    registry.raise_mismatches()
    [told] = [r for r in caplog.records if "newer than this package knows" in r.getMessage()]
    assert told.levelname == "WARNING"
    idle["idle"] = True  # now a feature is in use whose target is not there
    with pytest.raises(UpstreamMismatch, match=r"fake_upstream\.core:gone"):
        registry.raise_mismatches()
    registry.deactivate()
    edited = Registry((0, 20))
    _pin(monkeypatch, core.add, sha256="0" * 64)
    edited.register([_patch("add")])
    edited.activate()
    with pytest.raises(UpstreamMismatch, match="expected source 0000"):
        edited.raise_mismatches()
    edited.deactivate()


def test_an_object_that_had_a_name_before_keeps_it_after_undoing(
    package: str, registry: Registry
) -> None:
    """Like `torch.cuda.FloatTensor`, which is `torch.FloatTensor` while the host is the device."""
    user, core = _load("user"), _load("core")
    box, base = core.Box, core.Base
    patch = Patch(
        id="x", target="fake_upstream.core:Box", reason="-", kind="set", fn=lambda _: base
    )
    registry.register([patch])
    registry.activate()
    assert (core.Box, user.Box) == (base, base)
    registry.deactivate()
    assert (core.Box, user.Box, core.Base) == (box, box, base)


def test_one_replacement_of_two_originals_is_undone_where_it_was_put(
    package: str, registry: Registry
) -> None:
    user, core = _load("user"), _load("core")
    add, box = core.add, core.Box

    def both(*_args: Any) -> str:
        return "both"

    registry.register(
        [_patch(name, name, kind="set", fn=lambda _: both) for name in ("add", "Box")]
    )
    registry.activate()
    assert user.plus is user.Box is both
    registry.deactivate()
    assert (core.add, user.plus) == (add, add)
    assert (core.Box, user.Box) == (box, box)


def test_copies_of_a_copy_that_was_patched_are_restored_too(
    package: str, registry: Registry
) -> None:
    """Of a name that is itself a copy, only that one is changed; others may copy it meanwhile."""
    user = _load("user")
    add = user.plus
    patch = Patch(
        id="x", target="fake_upstream.user:plus", reason="-", kind="set", fn=lambda _: print
    )
    fresh = Patch(id="y", target="fake_upstream.user:Box", reason="-", fn=_tag("y"))
    registry.register([patch, fresh])
    registry.activate()
    later = ModuleType("fake_upstream.later")
    later.Box, later.plus, box = user.Box, user.plus, _load("core").Box
    sys.modules["fake_upstream.later"] = later
    registry.deactivate()
    assert user.Box is later.Box is box
    assert user.plus is add
    assert later.plus is print  # the one that everybody knows as print cannot be told from it
