"""The note that each failing rank leaves, and which of them explains the others."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.errors import HangError, PeerDied, UserError
from megatron_ext.upstream import cause, failure
from megatron_ext.upstream.cause import KINDS, Cause


@pytest.fixture(autouse=True)
def first_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    for module in (
        "training.global_vars",
        "core.rerun_state_machine",
        "core.parallel_state",
    ):
        monkeypatch.delitem(sys.modules, f"megatron.{module}", raising=False)


def raised(error: BaseException, because: BaseException | None = None) -> BaseException:
    try:
        raise error from because
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "kind", "reason", "code"),
    [
        (ValueError("no weights\nsecond line"), "error", "ValueError: no weights", 1),
        (KeyError("a"), "error", "KeyError: 'a'", 1),
        (UserError("no table"), "error", "no table", 2),
        (PeerDied("rank 0 died"), "effect", "rank 0 died", 1),
        (
            RuntimeError("[gloo/x.cc:3] Connection closed by peer"),
            "effect",
            "RuntimeError: ",
            1,
        ),
        (HangError("rank 0 holds the job up", 0), "hang", "rank 0 holds", None),
        (SystemExit(7), "exit", "sys.exit(7) at test_cause.py:", 7),
        (SystemExit("no data"), "exit", "no data (sys.exit at test_cause.py:", 1),
        (SystemExit(), "left", "sys.exit() at test_cause.py:", 0),
        (
            AssertionError(),
            "error",
            "AssertionError: raise error from because (test_cause.py:",
            1,
        ),
        (
            ValueError(
                "Caught OSError in worker 0.\nOriginal Traceback (...):\n  x\nOSError: gone"
            ),
            "error",
            "OSError: gone",
            1,
        ),
        # torchrun stops the workers of a failed job, but the system kills them if memory is full.
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated."),
            "effect",
            "RuntimeError: DataLoader worker",
            1,
        ),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
            "error",
            "RuntimeError: DataLoader worker",
            1,
        ),
    ],
)
def test_the_words_of_an_exception(
    error: BaseException, kind: str, reason: str, code: int | None
) -> None:
    ending = cause.of_error(raised(error))
    assert (ending.kind, ending.code) == (kind, code)
    assert ending.reason.startswith(reason)
    assert "\n" not in ending.reason
    assert ending.rank == (0 if kind == "hang" else 1)


@pytest.mark.parametrize(
    "first", [HangError("rank 0 holds the job up", 0), PeerDied("0 died")]
)
def test_what_fails_while_a_job_ends_does_not_hide_why_it_ends(
    first: Exception,
) -> None:
    """torch's data loader raises when its workers are killed, in whatever the rank does then."""
    later: BaseException = raised(first)
    try:
        try:
            raise later
        finally:
            raise RuntimeError(
                "DataLoader worker (pid 7) is killed by signal: Terminated."
            )
    except RuntimeError as error:
        later = error
    assert cause.of_error(later).kind == cause.of_error(first).kind
    assert cause.of_error(later).reason == cause.of_error(first).reason


def test_the_exception_behind_an_exception_comes_first() -> None:
    error = raised(RuntimeError("no data set"), raised(FileNotFoundError("part.bin")))
    said = "FileNotFoundError: part.bin; this led to RuntimeError: no data set"
    assert cause.of_error(error).reason == said


def test_a_checkpoint_that_megatron_does_not_load_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(failure, "_is_first", lambda _: True)
    for module, has_failed in (
        ("megatron.training.checkpointing", True),
        ("my.script", False),
    ):
        namespace = {"__name__": module}
        exec("import sys\ndef load(): sys.exit()", namespace)
        with pytest.raises(SystemExit) as ended:
            namespace["load"]()  # type: ignore[operator]
        assert failure.report_exit(ended.value) is has_failed
        assert cause.of_error(ended.value).code == int(has_failed)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert (
        "error: Megatron did not load the checkpoint; its log above says why: sys.exit()"
        in lines[0]
    )


def rejecting(
    monkeypatch: pytest.MonkeyPatch, message: str | None, stage: int = 0
) -> None:
    call = message and SimpleNamespace(caller=SimpleNamespace(message=message))
    machine = SimpleNamespace(
        failed_validation_call=call,
        rerun_requested=call is not None,
        continue_requested=False,
        initial_result=float("nan"),
        state=SimpleNamespace(name="RERUNNING_IN_PLACE"),
    )
    modules: dict[str, Any] = {
        "core.rerun_state_machine": SimpleNamespace(
            _GLOBAL_RERUN_STATE_MACHINE=machine
        ),
        "training.global_vars": SimpleNamespace(
            _GLOBAL_ARGS=SimpleNamespace(curr_iteration=4)
        ),
        "core.parallel_state": SimpleNamespace(
            get_pipeline_model_parallel_rank=lambda: stage,
            get_pipeline_model_parallel_world_size=lambda: 2,
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"megatron.{name}", module)


def test_a_loss_that_is_nan_comes_before_the_gradients_that_it_spoils(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endings = []
    for message, stage in (
        ("NaN in grad", 0),
        ("NaN in loss", 1),
        ("NaN in grad", 1),
        (None, 1),
    ):
        rejecting(monkeypatch, message, stage)
        endings.append(cause.of_error(SystemExit(17)))
    # Without --save upstream's saving fails on all ranks, whatever they have seen.
    rejecting(monkeypatch, "NaN in loss")
    endings.append(cause.of_error(raised(TypeError("expected str, not NoneType"))))
    reasons = [ending.reason for ending in endings]
    assert reasons[4] == reasons[1] == "NaN in loss (result: nan)"
    assert reasons[3] == "Megatron's result check failed on another rank"
    assert [ending.iteration for ending in endings] == [5] * 5
    order = sorted(endings[:4], key=lambda ending: ending.precedence)
    assert order == [endings[index] for index in (1, 2, 0, 3)]


def test_a_result_that_was_rejected_in_an_earlier_step_is_no_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rejecting(monkeypatch, "NaN in loss")
    machine = sys.modules[
        "megatron.core.rerun_state_machine"
    ]._GLOBAL_RERUN_STATE_MACHINE
    machine.rerun_requested = False
    assert cause.of_error(raised(ValueError("no"))).reason == "ValueError: no"


kinds = st.sampled_from(KINDS)
endings_of_ranks = st.lists(
    st.builds(
        Cause,
        rank=st.integers(0, 7),
        kind=kinds,
        reason=st.text(max_size=5),
        at=st.floats(0, 1e9),
        iteration=st.none() | st.integers(1, 9),
    ),
    min_size=1,
    max_size=5,
)


@given(endings_of_ranks)
def test_the_first_cause_does_not_depend_on_the_order_of_the_ranks(
    endings: list[Cause],
) -> None:
    answers = {cause.first(order) for order in itertools.permutations(endings)}
    precedences = {answer.precedence for answer in answers if answer is not None}
    assert precedences == {min(ending.precedence for ending in endings)}
    iterations = [
        ending.iteration for ending in endings if ending.iteration is not None
    ]
    assert all(
        (answer.iteration is None) == (not iterations) for answer in answers if answer
    )


def test_a_rank_keeps_the_number_with_which_it_was_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restart in the same processes changes RANK, which is None in reserve."""
    monkeypatch.setenv("RANK", "None")
    assert cause.of_error(ValueError("no")).rank == 0  # the launcher is not ours
    monkeypatch.setenv("MEGATRON_EXT_STARTED_RANK", "5")
    assert cause.of_error(ValueError("no")).rank == 5
    monkeypatch.setenv("RANK", "1")
    assert cause.of_error(ValueError("no")).rank == 5
    hang = cause.of_error(HangError("rank 1 runs 0F0 for 20.1 s", 1))
    assert (hang.kind, hang.rank, hang.code) == ("hang", 5, 1)
    blames = cause.of_error(HangError("rank 0 holds the job up", 0))
    assert (blames.kind, blames.rank, blames.code) == ("hang", 0, None)


def test_a_note_is_read_as_it_was_written_and_others_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for local_rank, text in enumerate(("{}", "[", '{"cause": {"kind": "what"}}')):
        path = tmp_path / f"job/attempt_0/{local_rank}/error.json"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    ending = Cause(3, "error", "ValueError: no", 5.5, iteration=2, code=1)
    cause.write(ending, "the stack")
    assert cause.read(tmp_path) == [ending]
    assert cause.read(tmp_path, survived=[2]) == []
    # What torchrun reads.
    assert json.loads(path.read_text())["message"]["extraInfo"]["timestamp"] == "4"
