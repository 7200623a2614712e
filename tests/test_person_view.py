"""The short form of training logs, of lines that Megatron printed and of a live run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.upstream import person_view
from megatron_ext.upstream.person_view import PersonView
from tests.ranks import start_script
from tests.upstream_script.runs import GPT

_STEP = (
    " [2026-11-25 04:52:50.296595] iteration        1/       6 | consumed samples:            4 | "
    "elapsed time per iteration (ms): 305.5 | learning rate: 8.500000E-04 | global batch size:     "
    "4 | lm loss: 4.855259E+00 | mtp_1 loss: 4.711111E+00 | loss scale: 1.0 | grad norm: 1.747 | "
    "number of skipped iterations:   {skipped} | number of nan iterations:   0 |"
)
_SHORT = "iteration 1/6  loss 4.8553  mtp_1 loss 4.7111  gradient norm 1.7470  306 ms  419 tokens/s"
_ARGUMENTS = "  seq_length ...................................... 32"
_BUBBLE = " pipeline: bubble 50.8 %, 1.0 MiB/s between ranks, 0.0 % of the actions out of order"
_TRACEBACK = """\
Traceback (most recent call last):
  File "model.py", line 3, in forward
    raise ValueError("no\\nweights")
ValueError: no
weights
"""
_TORCHRUN = """\
E1125 04:51:15.918000 12185 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitco
Traceback (most recent call last):
  File "torch/distributed/run.py", line 1032, in <module>
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
megatron_ext FAILED
[0]:
  exitcode  : -9 (pid: 12412)
"""


def short(*lines: str) -> list[str]:
    view = PersonView()
    shown = [one for line in "\n".join(lines).splitlines() for one in view.feed(line)]
    return shown + view.flush()


def test_a_step_is_one_short_line() -> None:
    assert short(_ARGUMENTS, _STEP.format(skipped=0)) == [_SHORT]
    assert short(_ARGUMENTS, _BUBBLE, _STEP.format(skipped=1)) == [
        f"{_SHORT}  1 skipped  bubble 50.8 %"
    ]
    assert "tokens" not in short(_STEP.format(skipped=0))[0]


def test_stages_of_the_start_and_checkpoints_come_once() -> None:
    log = """\
using world size: 4, data-parallel size: 1, context-parallel size: 1, hierarchical \
context-parallel sizes: None, tensor-model-parallel size: 2, pipeline-model-parallel size: 2
 > number of parameters on (tensor, pipeline) model parallel rank (0, 1): 1500000
 > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 2500000
> building train, validation, and test datasets ...
> building train, validation, and test datasets ...
[before the start of training step] datetime: 2026-11-25 04:52:50.011847
saving checkpoint at iteration       3 to a/b in torch_dist format
  [2026-11-25 04:52] successfully saved checkpoint from iteration       3 to a/b [ t 1/1, p 1/2 ]
 validation loss at iteration 4 on test set | lm loss value: 4.7237E+00 | lm loss PPL: 1.12E+02 |
  successfully loaded checkpoint from a/b [ t 1/1, p 1/2 ] at iteration 3
"""
    assert short(log) == [
        "4 ranks, tensor 2, pipeline 2",
        "preparing the data",
        "training 4.0 million parameters",
        "saving iteration 3",
        "saved iteration 3 to a/b",
        "test at iteration 4: loss 4.7237",
        "continues from iteration 3 of a/b",
    ]


def test_lines_of_two_ranks_may_stand_in_one() -> None:
    rank = (
        " > number of parameters on (tensor, pipeline) model parallel rank (0, %d): %d"
    )
    start = "[before the start of training step] datetime: 2026-11-25 04:52:50.011847"
    assert short(f"{rank % (0, 800000)}{rank % (1, 790000)}\n\n{start}\n") == [
        "training 1.6 million parameters"
    ]


def test_warnings_that_matter_and_our_lines_are_shown() -> None:
    assert short(
        "/x/backends.py:21: UserWarning: Apex is not installed. Falling back to Torch Norm",
        "/x/model.py:21: UserWarning: the weights are all zero",
        '  warnings.warn("the weights are all zero")',
        "WARNING:megatron.core.rerun_state_machine:Result validation enabled",
        "WARNING:megatron.core.optimizer:gradients are not finite",
        "megatron_ext: pipeline schedule: zb-v",
    ) == [
        "warning: the weights are all zero",
        "warning: gradients are not finite",
        "megatron_ext: pipeline schedule: zb-v",
    ]


def test_logged_errors_are_shown_once_for_all_ranks_and_steps() -> None:
    rejected = (
        "ERROR:megatron.core.rerun_state_machine:Unexpected result nan on rank {}"
    )
    assert short(
        rejected.format(3),
        rejected.format(2),
        "CRITICAL:root:the disk is full",
        "ERROR: no kernels",
    ) == [
        "error: Unexpected result nan on rank 3",
        "error: the disk is full",
        "error: no kernels",
    ]


def test_equal_tracebacks_of_several_ranks_are_shown_once_and_whole() -> None:
    view = PersonView()
    shown = [
        text
        for line in _TRACEBACK.splitlines()
        for source in ("0", "1")
        for text in view.feed(line, source)
    ]
    assert "\n".join(shown) + "\n" == _TRACEBACK
    assert view.failed
    assert [text for line in _TORCHRUN.splitlines() for text in view.feed(line)] == []


def test_torchs_mark_of_a_rank_does_not_hide_a_traceback() -> None:
    first, *_, last = marked = [
        f"[rank1]: {line}" for line in _TRACEBACK.splitlines()[:4]
    ]
    view = PersonView()
    assert [view.feed(line) for line in marked][-1] == _TRACEBACK.splitlines()[:4]
    assert view.has_shown(last)
    assert not view.has_shown(first)
    assert view.feed("[rank1]: weights") == ["weights"]
    assert view.feed("\tdecoder.final_layernorm.bias") == [], (
        "what was printed before it comes late"
    )


def test_a_killed_rank_is_shown_by_the_report_of_torchrun() -> None:
    assert short(_TORCHRUN) == _TORCHRUN.splitlines()[1:]


def test_a_log_that_ends_within_a_traceback_shows_it() -> None:
    assert short(*_TRACEBACK.splitlines()[:2]) == _TRACEBACK.splitlines()[:2]


def test_a_traceback_of_an_error_without_the_word_does_not_hide_the_training() -> None:
    log = [*_TRACEBACK.splitlines()[:3], "queue.Empty"]
    step = _STEP.format(skipped=0)
    assert short(_ARGUMENTS, *log, step) == [_SHORT, *log]
    assert short(_ARGUMENTS, *log[:2], step, *log[2:]) == [_SHORT, *log], (
        "another process's"
    )


def test_the_command_keeps_the_log_and_needs_the_standard_library_alone(
    tmp_path: Path,
) -> None:
    log = f"{_ARGUMENTS}\n{_STEP.format(skipped=0)}\n"
    command = [sys.executable, "-S", person_view.__file__]
    for option, shown in ([], f"{_SHORT}\n"), (["--raw"], log):
        ended = subprocess.run(
            [*command, "--log", str(tmp_path / "all.txt"), *option],
            input=log,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert ended.stdout == shown
        assert (tmp_path / "all.txt").read_text() == log


@pytest.mark.tree
def test_a_training_in_short(megatron_lm_path: Path) -> None:
    flags = f"{GPT} --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1".split()
    env = {"MEGATRON_EXT_STEP_BUBBLE": "1"}
    ended = start_script(2, "pretrain_gpt.py", flags, timeout_s=240, env=env)
    assert ended.exit_codes == [0, 0]
    lines = short("".join(ended.logs))
    steps = [line for line in lines if line.startswith("iteration ")]
    assert len(steps) == 5
    assert all(" tokens/s  bubble " in line and "  loss 4." in line for line in steps)
    assert len(lines) <= 15, lines


def test_a_step_with_words_for_numbers_is_shown_as_it_is() -> None:
    view = PersonView()
    assert view.feed(" iteration 1/ 10 | accuracy loss: n/a |") == [
        "iteration 1/ 10 | accuracy loss: n/a |"
    ]
