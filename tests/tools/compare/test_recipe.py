"""A command line is cut into what all runs share and what a candidate adds."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import ArgumentsError
from megatron_ext.tools.compare.recipe import (
    REFERENCE,
    Candidate,
    Recipe,
    candidates,
    label_of,
)

OURS = (
    ["--pipeline-schedule", "zb-v"], ["--use-dpp"], ["--node-ips", "a", "b"],
    ["--pipeline-transport=shm"], ["--dpp-policy", "hint"],
)  # fmt: skip
MEGATRONS = (
    ["--num-layers", "8"], ["--bf16"], ["--lr=1e-3"], ["--moe-layer-freq", "([0]*1+[1]*3)"],
    ["--split", "98,1,1"], ["--init-method-std", "-1"], ["--device-backend", "cpu"],
)  # fmt: skip


@given(st.permutations(OURS + MEGATRONS))
def test_flags_of_ours_leave_the_recipe_whatever_their_order(
    groups: list[list[str]],
) -> None:
    recipe = Recipe.of(
        ["pretrain_gpt.py", *(word for group in groups for word in group)]
    )
    assert recipe.flags == tuple(
        w for group in groups if group in MEGATRONS for w in group
    )
    assert recipe.pipeline == tuple(
        w for group in groups if group in OURS for w in group
    )


def test_no_run_saves_logs_or_ends_as_the_recipe_says() -> None:
    words = (
        "--save out --save-interval 5 --tensorboard-dir t --exit-interval 3 "
        "--trace-dir x --bf16"
    )
    recipe = Recipe.of(["--", "pretrain_gpt.py", *words.split()])
    assert recipe.flags == ("--bf16",)
    assert "left out: --save; no run writes to your checkpoints" in recipe.notes
    assert len(recipe.notes) == 3


def test_no_run_loads_local_checkpoints_instead_of_the_common_weights() -> None:
    words = (
        "--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir d --bf16 "
        "--replication --replication-jump 1"
    )
    recipe = Recipe.of(["--", "pretrain_gpt.py", *words.split()])
    assert recipe.flags == ("--bf16",)
    [note] = recipe.notes
    assert note.startswith("left out: --non-persistent-ckpt-type; ")


def test_a_command_without_a_script_says_what_to_give() -> None:
    with pytest.raises(ArgumentsError, match="name a script after --"):
        Recipe.of(["--num-layers", "8"])


def test_the_last_value_of_a_flag_counts() -> None:
    recipe = Recipe.of(shlex.split("pretrain_gpt.py --lr 1 --lr=2 --bf16"))
    assert recipe.value("--lr") == "2"
    assert recipe.has("--bf16")
    assert not recipe.has("--fp16")
    assert recipe.without("--lr").flags == ("--bf16",)


def test_a_checkpoint_that_is_there_starts_all_runs(tmp_path: Path) -> None:
    recipe = Recipe.of(["pretrain_gpt.py", "--load", str(tmp_path)])
    assert not recipe.loads, (
        "a recipe that resumes from its own --save has none at first"
    )
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert recipe.loads


def test_each_candidate_is_compared_once() -> None:
    recipe = Recipe.of("pretrain_gpt.py --bf16 --pipeline-schedule zb-v".split())
    zb_v = ("--pipeline-schedule", "zb-v")
    dpp = ("--pipeline-schedule", "1f1b", "--use-dpp")
    runs = candidates(recipe, (), [zb_v, dpp])
    assert runs == [
        Candidate(REFERENCE, ()), Candidate("zb-v", zb_v), Candidate("1f1b --use-dpp", dpp),
    ]  # fmt: skip
    assert recipe.command(runs[1], "--trace") == [
        "pretrain_gpt.py", "--bf16", "--pipeline-schedule", "zb-v", "--trace",
    ]  # fmt: skip
    assert label_of(["--pipeline-schedule=bitpipe"]) == "bitpipe"


def test_a_recipe_without_a_candidate_says_how_to_name_one() -> None:
    with pytest.raises(ArgumentsError, match="add --pipeline-schedule NAME"):
        candidates(Recipe.of(["pretrain_gpt.py", "--bf16"]), (), [])
