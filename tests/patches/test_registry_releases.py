"""Targets that are not as expected, and rows for other releases."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ext.errors import UpstreamMismatch
from megatron_ext.patches import drift
from megatron_ext.patches.registry import Patch, Registry
from megatron_ext.upstream import releases

from .made_up import load, patch, tag

NEWER = (max(releases.REFERENCES)[0], max(releases.REFERENCES)[1] + 1)


def test_a_missing_target_never_breaks_the_import_but_refuses_the_run(
    package: str, registry: Registry
) -> None:
    registry.register([patch("gone"), patch("Box.gone", label="y", when=lambda: False)])
    registry.activate()
    assert load("core").add(1) == 2
    assert [row.state for row in registry.rows()] == ["refused", "absent"]
    with pytest.raises(UpstreamMismatch) as caught:
        registry.raise_mismatches()
    assert caught.value.target == "fake_upstream.core:gone"
    assert caught.value.actual.startswith("nothing")


def test_a_missing_target_of_an_idle_patch_is_no_error(
    package: str, registry: Registry
) -> None:
    registry.register([patch("gone", when=lambda: False)])
    registry.activate()
    load("core")
    registry.raise_mismatches()


def _pin(monkeypatch: pytest.MonkeyPatch, original: Any, **changes: str) -> None:
    entry = {**drift.fingerprint(original), **changes}  # type: ignore[dict-item]
    pin = {"version": "0", "files": {}, "targets": {"fake_upstream.core:add": entry}}
    monkeypatch.setattr(drift, "_load", lambda: pin)


def test_an_edited_function_is_refused_at_the_call(
    package: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = load("core")
    _pin(monkeypatch, core.add, sha256="0" * 64)
    registry.register([patch("add")])
    registry.activate()
    assert "edited" in registry.rows()[0].drift
    with pytest.raises(
        UpstreamMismatch, match=r"fake_upstream\.core:add: expected source 0000"
    ):
        core.add(1)
    monkeypatch.setenv("MEGATRON_EXT_DRIFT", "warn")
    assert core.add(1) == ("x", 2)


def test_a_changed_signature_is_told_as_such(
    package: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pin(monkeypatch, load("core").add, sha256="0" * 64, signature="(a)")
    registry.register([patch("add")])
    registry.activate()
    with pytest.raises(
        UpstreamMismatch, match=r"expected signature \(a\), found \(a, b=1\)"
    ):
        registry.raise_mismatches()


def test_an_equal_function_is_not_refused(
    package: str, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pin(monkeypatch, load("core").add)
    registry.register([patch("add")])
    registry.activate()
    registry.raise_mismatches()
    assert load("core").add(1) == ("x", 2)


def _variants() -> list[Patch]:
    return [
        patch("add", label="a", until=(0, 17)),
        patch("Box.get", label="a", since=(0, 17), until=(0, 19)),
        patch("Box.double", label="a", since=(0, 19)),
    ]


@pytest.mark.parametrize(
    ("release", "place"),
    [((0, 16), "add"), ((0, 18), "Box.get"), ((0, 19), "Box.double")],
)
def test_of_rows_that_share_an_id_that_for_the_release_acts(
    package: str, release: tuple[int, int], place: str
) -> None:
    registry = Registry(release)
    registry.register(_variants())
    registry.activate()
    core = load("core")
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
    assert states == {
        n: "installed" if n == place else "other release" for n in patched
    }


def test_rows_for_one_release_may_not_share_an_id(registry: Registry) -> None:
    registry.register([patch("add", until=(0, 18))])
    with pytest.raises(ValueError, match=r"id x is taken by fake_upstream\.core:add"):
        registry.register([patch("Box.get", since=(0, 17))])
    registry.register([patch("Box.get", since=(0, 18))])


def test_a_convenience_may_be_absent(package: str, registry: Registry) -> None:
    registry.register([patch("gone", required=False)])
    registry.activate()
    load("core")
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
        fn=tag("x"),
        when=lambda: wanted["x"],
    )
    registry.register([patch])
    registry.activate()
    registry.raise_mismatches()  # the package is not there either, so nothing is known
    load("core")
    registry.raise_mismatches()
    wanted["x"] = True
    with pytest.raises(UpstreamMismatch, match="fake_upstream has no such module"):
        registry.raise_mismatches()


def test_drift_that_is_allowed_is_one_line_on_one_rank(
    package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEGATRON_EXT_DRIFT", "warn")
    _pin(monkeypatch, load("core").add, sha256="0" * 64)
    for rank, lines in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        registry = Registry()
        registry.register([patch("add"), patch("add", label="y")])
        registry.activate()
        registry.raise_mismatches()
        registry.raise_mismatches()
        registry.deactivate()
        told = [
            r for r in caplog.records if "MEGATRON_EXT_DRIFT=warn" in r.getMessage()
        ]
        assert len(told) == lines
    assert "fake_upstream.core:add has source" in told[0].getMessage()


@pytest.mark.parametrize("kind", ["wrap", "replace"])
def test_an_edit_is_said_to_run_or_not(
    package: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    monkeypatch.setenv("MEGATRON_EXT_DRIFT", "warn")
    monkeypatch.setenv("RANK", "0")
    _pin(monkeypatch, load("core").add, sha256="0" * 64)
    registry = Registry()
    registry.register([patch("add", kind=kind)])
    registry.activate()
    registry.raise_mismatches()
    registry.deactivate()
    loss = "(edited) and does not run, because x replaces it"
    assert (loss in caplog.text) == (kind == "replace")


def test_a_release_newer_than_all_known_runs_where_everything_fits(
    package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "0")
    core = load("core")
    registry = Registry(NEWER)
    idle = {"idle": False}
    registry.register(
        [patch("add"), patch("gone", label="y", when=lambda: idle["idle"])]
    )
    _pin(monkeypatch, core.add)
    registry.activate()
    registry.raise_mismatches()
    [told] = [
        r
        for r in caplog.records
        if "newer than the supported releases" in r.getMessage()
    ]
    assert told.levelname == "WARNING"
    idle["idle"] = True  # now a feature is in use whose target is not there
    with pytest.raises(UpstreamMismatch, match=r"fake_upstream\.core:gone"):
        registry.raise_mismatches()
    registry.deactivate()
    edited = Registry(NEWER)
    _pin(monkeypatch, core.add, sha256="0" * 64)
    edited.register([patch("add")])
    edited.activate()
    with pytest.raises(UpstreamMismatch, match="expected source 0000"):
        edited.raise_mismatches()
    edited.deactivate()
