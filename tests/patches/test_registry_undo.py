"""Undoing gives every object back to every name that had it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from megatron_ext.patches.registry import Patch, Registry

from .made_up import load, patch, tag


def test_deactivate_restores_every_original(package: str, registry: Registry) -> None:
    user, core = load("user"), load("core")
    names = {
        "add": core.add,
        "Box.get": vars(core.Box)["get"],
        "Box.double": vars(core.Box)["double"],
        "Box.make": vars(core.Box)["make"],
    }
    registry.register([patch(name, label=name) for name in names])
    registry.register(
        [
            patch("LIMIT", label="limit", kind="set", fn=lambda old: old + 4),
            patch("EXTRA", label="extra", kind="set", fn=lambda old: old, creates=True),
            patch(
                "Box.extra", label="attr", kind="set", fn=lambda old: 5, creates=True
            ),
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
    core = load("core")
    original = core.add
    registry.register([patch("add")])
    registry.activate()
    user = load("user")
    user.Keeper = type(
        "Keeper",
        (),
        {"__module__": user.__name__, "f": core.add, "g": staticmethod(core.add)},
    )
    registry.deactivate()
    assert vars(user.Keeper)["f"] is original
    assert user.Keeper.g is original


def test_copies_out_of_reach_act_like_the_original_once_inactive(
    package: str, registry: Registry
) -> None:
    registry.register([patch("add")])
    registry.activate()
    kept = {"closure": load("core").add}
    registry.deactivate()
    assert kept["closure"](1) == 2


def test_an_object_that_had_a_name_before_keeps_it_after_undoing(
    package: str, registry: Registry
) -> None:
    """Like `torch.cuda.FloatTensor`, which is `torch.FloatTensor` while the host is the device."""
    user, core = load("user"), load("core")
    box, base = core.Box, core.Base
    patch = Patch(
        id="x",
        target="fake_upstream.core:Box",
        reason="-",
        kind="set",
        fn=lambda _: base,
    )
    registry.register([patch])
    registry.activate()
    assert (core.Box, user.Box) == (base, base)
    registry.deactivate()
    assert (core.Box, user.Box, core.Base) == (box, box, base)


def test_one_replacement_of_two_originals_is_undone_where_it_was_put(
    package: str, registry: Registry
) -> None:
    user, core = load("user"), load("core")
    add, box = core.add, core.Box

    def both(*_args: Any) -> str:
        return "both"

    registry.register(
        [patch(name, name, kind="set", fn=lambda _: both) for name in ("add", "Box")]
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
    user = load("user")
    add = user.plus
    patch = Patch(
        id="x",
        target="fake_upstream.user:plus",
        reason="-",
        kind="set",
        fn=lambda _: print,
    )
    fresh = Patch(id="y", target="fake_upstream.user:Box", reason="-", fn=tag("y"))
    registry.register([patch, fresh])
    registry.activate()
    later = ModuleType("fake_upstream.later")
    later.Box, later.plus, box = user.Box, user.plus, load("core").Box
    sys.modules["fake_upstream.later"] = later
    registry.deactivate()
    assert user.Box is later.Box is box
    assert user.plus is add
    assert (
        later.plus is print
    )  # the one that everybody knows as print cannot be told from it


class _Settings:
    """An object of the program; like a `TransformerConfig`, it cannot be a key."""

    __hash__ = None  # type: ignore[assignment]
    value = 0


def test_changes_to_objects_are_undone_and_forgotten_with_them() -> None:
    """A program may create such an object in every micro-batch."""
    registry = Registry()
    registry.activate()
    kept = _Settings()
    for settings in (kept, *(_Settings() for _ in range(3))):
        settings.value = 1
        registry.undo_change(settings, lambda changed: setattr(changed, "value", 0))
    del settings
    assert len(registry._undo_by_object) == 1
    registry.deactivate()
    assert kept.value == 0
    assert not registry._undo_by_object
