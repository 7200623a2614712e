"""The registry on a made-up upstream package, each test with a registry of its own."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import PatchConflict
from megatron_ext.patches.point import PatchPoint
from megatron_ext.patches.registry import Patch, Registry
from tests.commands import run_python

from .made_up import load, patch
from .single import remove


def test_a_patch_waits_for_its_module_and_reaches_every_copy(
    package: str, registry: Registry
) -> None:
    registry.register([patch("add")])
    registry.activate()
    assert [row.state for row in registry.rows()] == ["pending"]
    assert load("user").plus(1) == ("x", 2)
    assert [row.state for row in registry.rows()] == ["installed"]


def test_wraps_around_wraps_see_the_parameters_of_the_target(
    package: str, registry: Registry
) -> None:
    seen = {}

    def look(name: str) -> Callable[..., Any]:
        def fn(
            call: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: Any
        ) -> Any:
            seen[name] = inspect.signature(call).bind(*args, **kwargs).arguments
            return call(*args, **kwargs)

        return fn

    registry.register(
        [
            Patch(id=i, target="fake_upstream.core:add", reason="-", fn=look(i))
            for i in "abc"
        ]
    )
    registry.activate()
    assert load("core").add(1, b=2) == 3
    assert seen == {name: {"a": 1, "b": 2} for name in "abc"}


def test_arming_late_mends_renamed_copies_by_identity(
    package: str, registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    user = load("user")
    user.unrelated = add = lambda a, b=1: "mine"
    registry.register([patch("add")])
    registry.activate()
    assert user.plus(1) == ("x", 2)
    assert user.unrelated is add


def test_setting_a_copied_name_changes_that_copy_alone(
    package: str, registry: Registry
) -> None:
    user, core = load("user"), load("core")
    core.nothing = None
    add = core.add
    patch = Patch(
        id="x",
        target="fake_upstream.user:plus",
        reason="-",
        kind="set",
        fn=lambda old: None,
    )
    registry.register([patch])
    registry.activate()
    assert user.plus is None
    assert core.add is add
    registry.deactivate()
    assert user.plus is add
    assert core.nothing is None


def test_activate_and_deactivate_can_be_repeated(
    package: str, registry: Registry
) -> None:
    core = load("core")
    registry.register([patch("add")])
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
    registry.register([patch("add")])
    registry.activate()
    registry.deactivate()
    assert load("core").add(1) == 2
    registry.activate()
    assert load("core").add(1) == ("x", 2)


def test_a_patch_is_handed_what_it_works_on(package: str, registry: Registry) -> None:
    works_on: list[int | None] = [5]

    def fn(found: int, call: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        return found, call(*args, **kwargs)

    registry.register([patch("add", of=lambda: works_on[0], fn=fn)])
    registry.activate()
    add = load("core").add
    assert add(1) == (5, 2)
    works_on[0] = 0
    assert add(1) == (0, 2)
    works_on[0] = None
    assert add(1) == 2


def test_the_chain_is_chosen_at_each_call(package: str, registry: Registry) -> None:
    on = {"a": True, "r": False}
    registry.register(
        [
            patch("add", label="a", when=lambda: on["a"]),
            patch(
                "add",
                label="r",
                kind="replace",
                when=lambda: on["r"],
                fn=lambda *_: "replaced",
            ),
        ]
    )
    registry.activate()
    add = load("core").add
    assert add(1) == ("a", 2)
    on["r"] = True
    assert add(1) == ("a", "replaced")
    on["a"] = False
    assert add(1) == "replaced"
    on["r"] = False
    assert add(1) == 2


@given(
    st.lists(
        st.tuples(st.integers(-2, 2), st.booleans()),
        min_size=1,
        max_size=6,
        unique_by=lambda t: t,
    )
)
def test_wraps_run_by_order_then_id_and_only_the_active(
    wraps: list[tuple[int, bool]],
) -> None:
    module = ModuleType("fake_chain")
    module.f = lambda: ()
    sys.modules["fake_chain"] = module

    def wrap(label: str) -> Callable[..., Any]:
        return lambda call, instance, args, kwargs: (label, *call(*args, **kwargs))

    registry = Registry()
    ids = [f"{index:02d}" for index in range(len(wraps))]
    registry.register(
        Patch(
            id=i,
            target="fake_chain:f",
            reason="-",
            fn=wrap(i),
            order=order,
            when=lambda on=on: on,
        )
        for i, (order, on) in zip(ids, wraps, strict=True)
    )
    registry.activate()
    try:
        expected = sorted(
            (order, i) for i, (order, on) in zip(ids, wraps, strict=True) if on
        )
        assert module.f() == tuple(i for _, i in expected)
    finally:
        registry.deactivate()
        del sys.modules["fake_chain"]


def test_two_active_replacements_are_a_conflict_that_names_both(
    package: str, registry: Registry
) -> None:
    registry.register(
        [patch("add", label=i, kind="replace") for i in ("first", "second")]
    )
    registry.activate()
    with pytest.raises(PatchConflict, match=r"first, second"):
        load("core").add(1)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (patch("Box.get", label="x"), "id x is taken"),
        (
            patch("add", label="y", kind="set", fn=lambda old: old),
            "needs the target to itself",
        ),
    ],
)
def test_mistakes_in_tables_are_refused(
    registry: Registry, second: Patch, message: str
) -> None:
    registry.register([patch("add")])
    with pytest.raises(ValueError, match=message):
        registry.register([second])


def test_overwriting_by_others_is_seen_and_left_alone(
    package: str, registry: Registry
) -> None:
    core = load("core")
    registry.register(
        [patch("add"), patch("LIMIT", label="l", kind="set", fn=lambda old: 9)]
    )
    registry.activate()
    core.add, core.LIMIT = mine = (lambda a: "mine"), 11
    assert [row.intact for row in registry.rows()] == [False, False]
    registry.deactivate()
    assert (core.add, core.LIMIT) == mine


def test_a_removed_patch_is_undone(package: str, registry: Registry) -> None:
    core = load("core")
    registry.register([patch("add", label="a"), patch("add", label="b")])
    registry.activate()
    remove(registry, ["a"])
    assert core.add(1) == ("b", 2)
    remove(registry, ["b"])
    assert core.add(1) == 2
    assert registry.rows() == []


def test_patch_points_survive_copy_deepcopy_and_pickle(
    package: str, registry: Registry
) -> None:
    registry.register([patch("add")])
    registry.activate()
    point = load("core").add
    assert isinstance(point, PatchPoint)
    assert copy.copy(point) is point
    assert copy.deepcopy({"f": point})["f"] is point
    assert pickle.loads(pickle.dumps(point)) is point


_COMPILED = """
import sys, types, torch
from megatron_ext.patches.point import Patch
from megatron_ext.patches.registry import Registry
from tests.pipelines import make_pipeline, use
made_up = sys.modules["made_up"] = types.ModuleType("made_up")
exec("def double(x): return 2 * x", vars(made_up))
registry = Registry()
add = lambda call, _, args, kwargs: 40 + args[0]
registry.register([Patch("a.b", "made_up:double", "a test", add)])
registry.activate()
for pipeline in (None, make_pipeline("1f1b", 2, 4)):
    use(pipeline)
    print(torch.compile(lambda x: made_up.double(x) + 1, backend="eager")(torch.zeros(())).item())
    torch.compiler.reset()
"""


def test_compiled_code_runs_the_patches_of_a_schedule() -> None:
    done = run_python(
        "-c", _COMPILED, MEGATRON_EXT_DISABLE="1", TORCHDYNAMO_DISABLE="0"
    )
    assert done.stdout.split() == ["1.0", "41.0"], done.stderr
