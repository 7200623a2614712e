"""A mistyped command line gets one answer, from whatever is asked first."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from random import Random

import pytest

from megatron_ext import cli, preflight
from megatron_ext.tools.doctor.flight import check_training
from tests.config.mutated_lines import mutated
from tests.ranks import require_training, run_ranks, start_script
from tests.training.helpers import errors

COUNT = int(os.environ.get("MEGATRON_EXT_TEST_MUTATED_LINES", "500"))
"""Lines of the long test."""


def starts(lines: list[list[str]]) -> list[str]:
    """Return for each line why a training refuses it before it uses torch, or an empty text."""
    from megatron.training import arguments

    from megatron_ext.errors import UserError
    from megatron_ext.upstream import failure

    reported: list[str] = []
    failure.report = lambda error: reported.append(str(error))  # type: ignore[assignment]
    os.environ |= {"WORLD_SIZE": "2", "RANK": "0"}
    answers = []
    for words in lines:
        sys.argv = ["pretrain_gpt.py", *words]
        reported.clear()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                args = arguments.parse_args()
                arguments.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
        except SystemExit:
            [line] = reported
            answers.append(line)
        except UserError as error:
            answers.append(str(error))
        else:
            answers.append("")
    return answers


def dry_run(words: list[str]) -> tuple[int, str]:
    """Return the exit code of `launch --dry-run` and what it says on stderr."""
    output, said = io.StringIO(), io.StringIO()
    argv = ["launch", "--dry-run", "--nproc", "2", "--", "pretrain_gpt.py", *words]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(said):
        try:
            code = cli.main(argv)
        except SystemExit as error:
            code = int(error.code or 0)
    return code, said.getvalue()


def differences(lines: list[list[str]]) -> tuple[list[str], int]:
    """Return the lines whose answers differ, with them, and the number of accepted lines."""
    require_training()
    [answers] = run_ranks(1, starts, lines, timeout_s=1500)
    different, accepted = [], 0
    for words, answer in zip(lines, answers, strict=True):
        found = preflight(["pretrain_gpt.py", *words], world_size=2)
        said = "\n".join(map(str, found.refusals))
        diagnoses = check_training(["pretrain_gpt.py", *words], 2)
        fails = [str(finding) for finding in diagnoses if finding.level == "FAIL"]
        code, text = dry_run(words)
        is_same = said == answer or answer.startswith("Megatron-LM refused")
        if not is_same or bool(fails) != bool(answer) or code != (2 if answer else 0):
            line = " ".join(words)
            different.append(f"{line}\n{answer=}\n{said=}\n{fails=}\n{code=} {text}")
        assert "Traceback" not in text
        accepted += not answer
    return different, accepted


@pytest.mark.short_s(10)
def test_some_mutated_lines() -> None:
    random = Random(0)
    different, accepted = differences([mutated(random) for _ in range(24)])
    assert not different, "\n\n".join(different)
    assert 0 < accepted < 24


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_mutated_lines() -> None:
    random = Random(1)
    different, accepted = differences([mutated(random) for _ in range(COUNT)])
    print(f"{COUNT} lines: {accepted} accepted, {COUNT - accepted} refused")
    assert not different, "\n\n".join(different)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_real_starts_answer_the_same(seed: int) -> None:
    words = mutated(Random(seed))
    refused = preflight(["pretrain_gpt.py", *words], world_size=2).refusals
    run = start_script(2, "pretrain_gpt.py", words)
    if refused:
        [line] = set(errors(run))
        assert line.partition("error: ")[2] == str(refused[0])
    else:
        assert run.exit_codes == [0, 0], run.describe()
