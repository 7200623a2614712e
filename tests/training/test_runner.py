"""Starting scripts: which file or trainer a name stands for, and how errors end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_ext.errors import UpstreamMismatch, UserError
from megatron_ext.training import runner
from megatron_ext.upstream import releases
from megatron_ext.upstream import tree as upstream
from tests.commands import run_package


@pytest.fixture(autouse=True)
def no_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEGATRON_LM_PATH", "")  # so that what a test sets ends with it
    monkeypatch.delenv("MEGATRON_LM_PATH")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tree"
    (path / "megatron" / "training").mkdir(parents=True)
    (path / "megatron" / "training" / "__init__.py").write_text("")
    (path / "megatron" / "core").mkdir()
    tag = releases.reference().tag.partition("_v")[2]  # of the installed release
    info = "MAJOR = {}\nMINOR = {}\nPATCH = {}\n".format(*tag.split("."))
    (path / "megatron" / "core" / "package_info.py").write_text(info)
    (path / "pretrain_gpt.py").write_text("")
    monkeypatch.setenv("MEGATRON_LM_PATH", str(path))
    return path


def test_a_file_of_the_users_own_is_run_as_it_is(tmp_path: Path, tree: Path) -> None:
    script = Path("mine.py")
    script.write_text("")
    assert runner.choose("mine.py") == script.resolve()


def test_a_bare_name_is_taken_from_the_tree(tree: Path) -> None:
    assert runner.choose("pretrain_gpt.py") == tree / "pretrain_gpt.py"


def test_without_a_tree_the_wheels_own_loop_stands_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From 0.17 on the wheel brings megatron.training, which has GPT only."""
    monkeypatch.setattr(releases, "has_training", lambda: True)
    assert runner.choose("pretrain_gpt.py") is None


def test_a_wheel_without_a_loop_needs_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "has_training", lambda: False)
    monkeypatch.setattr(releases, "core_version", lambda: "0.16.1")
    with pytest.raises(UserError) as caught:
        runner.choose("pretrain_gpt.py")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(
        "megatron-core 0.16.1 has no training loop; get a Megatron-LM tree with `megatron-ext "
        "upstream fetch`, or set MEGATRON_LM_PATH to a checkout of Megatron-LM at core_v0.16.1; "
        "or use Python 3.12"
    )


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        (
            "0.16.1",
            "Megatron-LM's scripts need its tree: `megatron-ext upstream fetch`, or set",
        ),
        (
            "0.17.1",
            "Megatron-LM's scripts need its tree: `megatron-ext upstream fetch`, or set",
        ),
        (
            "0.19.2",
            "megatron-core 0.19.2 has no pretrain_bert.py; Megatron includes BERT only up to 0.17",
        ),
    ],
)
def test_bert_needs_a_release_that_has_it(
    version: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "has_training", lambda: True)
    monkeypatch.setattr(releases, "core_version", lambda: version)
    with pytest.raises(UserError, match=re.escape(remedy)):
        runner.choose("pretrain_bert.py")


def test_bert_is_what_the_tree_has(tree: Path) -> None:
    with pytest.raises(UserError, match=r"no pretrain_bert\.py"):
        runner.choose("pretrain_bert.py")
    (tree / "pretrain_bert.py").touch()
    assert runner.choose("pretrain_bert.py") == tree / "pretrain_bert.py"


@pytest.mark.skipif(
    not releases.has_training(), reason="the wheel has no training loop"
)
def test_the_wheels_loop_is_refused_where_everything_is_switched_off() -> None:
    """The loop would take `--pipeline-schedule` and train without."""
    ended = run_package(
        "pretrain_gpt.py", "--pipeline-schedule", "zb-v", MEGATRON_EXT_DISABLE="1"
    )
    assert ended.returncode == 2
    assert "MEGATRON_EXT_DISABLE=1 disables" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_script_inside_a_tree_uses_that_tree(tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tree.rename(other)
    tree.mkdir()
    assert runner.choose(str(other / "pretrain_gpt.py")) == other / "pretrain_gpt.py"
    assert upstream.find_tree() == other


def test_a_missing_script_says_how_to_get_the_tree(tree: Path) -> None:
    with pytest.raises(UserError, match="neither here nor in the Megatron-LM tree"):
        runner.choose("pretrain_t5.py")


def test_a_missing_script_without_a_tree_says_how_to_get_one() -> None:
    with pytest.raises(UserError, match="megatron-ext upstream fetch"):
        runner.choose("pretrain_t5.py")
    with pytest.raises(UserError, match=r"there is no gone/pretrain_gpt\.py"):
        runner.choose("gone/pretrain_gpt.py")


def test_a_tree_of_another_version_is_refused(tree: Path) -> None:
    info = tree / "megatron" / "core" / "package_info.py"
    info.write_text("MAJOR = 0\nMINOR = 15\nPATCH = 0\n")
    with pytest.raises(UpstreamMismatch, match=r"found version 0\.15\.0"):
        runner.choose("pretrain_gpt.py")


def test_a_script_sees_its_own_arguments_and_armed_patches() -> None:
    Path("mine.py").write_text(
        "import sys, helper\n"
        "from megatron.core.pipeline_parallel import p2p_communication as p2p\n"
        "print(__name__, sys.argv, helper.x, type(p2p._p2p_ops).__name__)\n"
    )
    Path("helper.py").write_text("x = 3\n")
    done = run_package("mine.py", "--flag", "1")
    assert done.returncode == 0, done.stderr
    path = str(Path("mine.py").resolve())
    assert (
        done.stdout.splitlines()[-1] == f"__main__ {[path, '--flag', '1']} 3 PatchPoint"
    )


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (["gone.py"], {}, "there is no gone.py"),
        (
            ["pretrain_gpt.py"],
            {"MEGATRON_LM_PATH": "/nowhere"},
            "is not a Megatron-LM tree",
        ),
        (["mine.py"], {"MEGATRON_EXT_DEVICE": "abacus"}, "abacus"),
        (["mine.py"], {"MEGATRON_EXT_DEVICE": "musa"}, "musa"),
    ],
)
def test_user_errors_are_one_message_and_exit_code_2(
    arguments: list[str], env: dict[str, str], message: str
) -> None:
    Path("mine.py").touch()
    done = run_package(*arguments, **env)
    assert done.returncode == 2
    assert message in done.stderr
    assert "megatron_ext: error: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_without_a_launcher_is_a_world_of_one() -> None:
    Path("mine.py").write_text(
        "from torch import distributed\n"
        "distributed.init_process_group('gloo')\n"
        "print(distributed.get_world_size())\n"
    )
    done = run_package("mine.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1"


@pytest.mark.parametrize(
    ("package", "remedy"),
    [
        ("einops", "pip install 'megatron-ext[upstream]' installs"),
        ("triton", "pip install 'megatron-ext[upstream]' installs"),
        ("apex", "none of megatron-ext's extras installs it: pip install apex"),
    ],
)
def test_a_package_that_only_upstream_needs_is_named_with_the_remedy(
    tree: Path, package: str, remedy: str
) -> None:
    missing = (
        f"raise ModuleNotFoundError('No module', name={package + '.language'!r})\n"
    )
    (tree / "megatron" / "training" / "__init__.py").write_text(missing)
    (tree / "pretrain_gpt.py").write_text("import megatron.training\n")
    done = run_package("pretrain_gpt.py")
    assert done.returncode == 2
    assert (
        f"imports {package}.language, which is not installed; {remedy}" in done.stderr
    )
    assert "Traceback" not in done.stderr
    Path("mine.py").write_text("import surely_not_there\n")
    assert "Traceback" in run_package("mine.py").stderr


def test_a_checkout_that_is_not_installed_names_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def requires(name: str) -> list[str]:
        raise runner.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(runner.metadata, "requires", requires)
    with pytest.raises(ModuleNotFoundError) as caught:
        exec("import surely_not_there", {"__name__": "megatron.training"})
    assert "imports surely_not_there, which is not installed" in str(
        runner._explained(caught.value)
    )


@pytest.mark.parametrize("reason", ["a bug of mine", "S3: Connection reset by peer"])
def test_errors_of_the_script_keep_their_traceback(reason: str) -> None:
    Path("mine.py").write_text(f"raise RuntimeError({reason!r})\n")
    done = run_package("mine.py")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert f"RuntimeError: {reason}" in done.stderr


WRAPPED = """
try:
    raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2")
except RuntimeError as error:
    raise Exception("failed to build the data") from error
"""


def test_a_rank_that_ended_is_named_though_megatron_hides_it(tree: Path) -> None:
    (tree / "megatron" / "training" / "__init__.py").write_text(WRAPPED)
    (tree / "pretrain_gpt.py").write_text("import megatron.training\n")
    done = run_package("pretrain_gpt.py")
    assert done.returncode == 1
    assert "lost the connection to another rank" in done.stderr
    assert "Traceback" not in done.stderr
    Path("mine.py").write_text(WRAPPED)
    assert "Traceback" in run_package("mine.py").stderr


def test_a_script_configures_logging_itself() -> None:
    Path("script.py").write_text(
        "import logging, sys\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(message)s')\n"
        "logging.getLogger('megatron.core.timers').info('times of the script')\n"
    )
    run = run_package("script.py")
    assert (run.returncode, run.stderr) == (0, "")
    assert "times of the script" in run.stdout


def test_without_arguments_the_usage_is_shown() -> None:
    done = run_package()
    assert done.returncode == 0
    assert "usage:" in done.stdout
