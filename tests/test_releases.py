"""The Megatron that is here and whether it can be used, on folders made for it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext.errors import UpstreamMismatch, UserError
from megatron_ext.upstream import releases
from tests.commands import run_package


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of `sys.path`, with nothing installed and nothing imported."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(releases, "installed_core", lambda: None)
    monkeypatch.delitem(sys.modules, "megatron.core.package_info", raising=False)
    return tmp_path


def _install(site: Path, version: str) -> None:
    core = site / "megatron" / "core"
    core.mkdir(parents=True)
    keys = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    (core / "package_info.py").write_text(
        "\n".join(f"{key} = {value}" for key, value in keys)
    )


@pytest.mark.parametrize(
    "version", ["0.16.0", "0.17.1", "0.18.2", "0.19.2", "0.20.0", "0.21.0"]
)
def test_releases_from_the_oldest_on_pass(site: Path, version: str) -> None:
    _install(site, version)
    releases.check_core()
    assert releases.core_version() == version
    assert releases.is_newer_than_known(releases.installed_release()) == (
        version == "0.21.0"
    )


def test_the_commit_of_a_repository_around_the_environment_is_no_part_of_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = SimpleNamespace(__version__="0.19.2+60acd9d")  # as of its import
    monkeypatch.setitem(sys.modules, "megatron.core.package_info", info)
    assert releases.core_version() == "0.19.2"


def test_each_release_has_the_reference_of_its_minor_and_newer_ones_the_newest() -> (
    None
):
    for release, reference in releases.REFERENCES.items():
        assert releases.reference(release) is reference
        assert releases.parse_release(reference.version) == release
    assert releases.reference((0, 25)) is releases.REFERENCES[max(releases.REFERENCES)]
    assert releases.reference((0, 1)) is releases.REFERENCES[min(releases.REFERENCES)]


def test_an_older_release_is_refused_in_one_line(site: Path) -> None:
    _install(site, "0.15.3")
    with pytest.raises(UpstreamMismatch) as caught:
        releases.check_core()
    text = str(caught.value)
    assert "\n" not in text
    assert "found version 0.15.3" in text
    assert "pip install 'megatron-core>=0.16.0,<0.21'" in text


def test_none_at_all_says_what_to_install(site: Path) -> None:
    with pytest.raises(
        UserError, match=re.escape("pip install 'megatron-core>=0.16.0,<0.21'")
    ):
        releases.check_core()


def test_the_unrelated_package_of_the_name_is_told_apart(site: Path) -> None:
    _install(site, "0.19.2")
    (site / "megatron" / "__init__.py").write_text("")
    with pytest.raises(UserError, match="pip uninstall megatron"):
        releases.check_core()


def test_the_range_is_that_of_the_packages_dependency() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert f'"megatron-core{releases.SUPPORTED}"' in text


def test_commands_refuse_the_unrelated_package_before_it_is_imported(
    tmp_path: Path,
) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("raise RuntimeError('imported')")
    done = run_package("pretrain_gpt.py", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "pip uninstall megatron" in done.stderr
    assert "Traceback" not in done.stderr
    doctor = run_package("doctor", PYTHONPATH=str(tmp_path))
    assert doctor.returncode == 1
    [line] = [line for line in doctor.stdout.splitlines() if "megatron-core" in line]
    assert "pip uninstall megatron" in line
