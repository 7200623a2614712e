"""Training with --trace on real ranks: what runs is recorded, and recording changes nothing."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megatron_ext.config import active
from megatron_ext.config.flags import pipeline_config
from megatron_ext.config.hosting import preflight
from megatron_ext.errors import ArgumentsError
from megatron_ext.schedules import generate
from megatron_ext.schedules.table import table_files
from megatron_ext.schedules.table.memory import measure
from megatron_ext.tools.trace import forecast, report
from megatron_ext.tools.trace.aggregate import Run, read_run, write_chrome_trace
from megatron_ext.tools.trace.survey import figures
from megatron_ext.tracing.session import subscribe
from megatron_ext.upstream.releases import core_version
from megatron_ext.upstream.signatures import parameters
from tests.commands import run_package
from tests.ranks import losses, run_ranks, run_script, start_script
from tests.runtime.capture import GPT, PP2, PP4
from tests.runtime.test_equality import EP2, EXPERTS, PAIRS
from tests.tools.trace.runs import arrows
from tests.tools.trace.test_report import content

if TYPE_CHECKING:
    from megatron_ext.tools.trace.reader import Iteration

LAYERS8 = GPT.replace("--num-layers 4", "--num-layers 8")


def train(flags: str, directory: Path | None) -> tuple[list[str], Run]:
    trace = [] if directory is None else ["--trace", "--trace-dir", str(directory)]
    logs = run_script(4, "pretrain_gpt.py", [*flags.split(), *trace])
    return logs, None if directory is None else read_run(directory)


def spans(run: Run, rank: int) -> list[Any]:
    return [
        span
        for iteration in run.surveys[rank].file.iterations()
        for span in iteration.spans
    ]


def names(run: Run, rank: int) -> set[str]:
    return {span.name for span in spans(run, rank)}


def test_a_dynamic_run_is_recorded_put_together_explained_and_planned(
    tmp_path: Path,
) -> None:
    dynamic = (
        f"{LAYERS8}{PP4}--use-dpp --num-layers-per-virtual-pipeline-stage 1 "
        "--pipeline-transport shm --overlap-grad-reduce --use-distributed-optimizer "
    )
    logs, run = train(dynamic, tmp_path / "run")
    plain, _ = train(dynamic, None)
    assert losses(logs) == losses(plain), "recording changes nothing"
    assert [survey.num_iterations for survey in run.surveys] == [3] * 4
    assert not any(survey.file.damaged for survey in run.surveys)
    table = table_files.from_json((tmp_path / "run" / "schedule.json").read_text())
    for rank in range(4):
        assert {"forward", "receive", "send", "reduce", "optimizer"} <= names(run, rank)
        found = sorted(
            (span.attributes["stage"], span.attributes["microbatch"])
            for span in spans(run, rank)
            if span.name == "forward"
        )
        row = [action for action in table.rows[rank] if action.kind == "F"]
        assert found == sorted(
            3 * [(action.stage, action.microbatch) for action in row]
        )
    waits = [
        span.attributes
        for rank in range(4)
        for span in spans(run, rank)
        if span.name == "wait"
    ]
    assert {wait["cause"] for wait in waits} <= {"input", "slot"}
    assert any("on" in wait for wait in waits)
    assert [survey.wires for survey in run.surveys] == [
        {(rank - 1) % 4: "shm", (rank + 1) % 4: "shm"} for rank in range(4)
    ]
    total = figures(run.surveys)
    assert 0 < total.bubble_ratio < 1
    assert total.memory_bytes > 2**20
    assert all(
        step.activation_bytes > 0 for survey in run.surveys for step in survey.steps
    )
    output = tmp_path / "chrome.json"
    write_chrome_trace(run, output)
    events = json.loads(output.read_text())
    starts, ends = arrows(events)
    assert starts.keys() == ends.keys()
    assert all(ends[key] > starts[key] for key in starts), (
        "nothing arrives before it is sent"
    )
    assert "planned: " in report.page(run)
    done = run_package(
        "plan", "--trace-dir", str(tmp_path / "run"), "--memory-gib", "64"
    )
    assert done.returncode == 0, done.stderr
    assert "\nrecommended: " in done.stdout
    flags = done.stdout.partition("\nflags (--json shows all):\n")[2].splitlines()
    assert len(flags) >= 3
    assert all(" --pipeline-model-parallel-size 4 " in line for line in flags)
    assert re.match(
        r"traced: interleaved chunks=2 with hint, step [\d.]+ ms, predicted as [\d.]+ ms\b",
        done.stdout,
    )
    settings = run.surveys[0].header.settings
    # Of what ranks import: a tree may stand before an installed package of another version.
    assert run.surveys[0].header.settings["megatron-core"] == core_version()
    assert settings["pipeline_schedule"] == "interleaved"
    assert settings["dpp_policy"] == "hint"
    assert settings["transport"] == "shm"
    ends = [
        each.header.rank
        for each in run.surveys
        if any(map(_told, each.file.iterations()))
    ]
    assert ends == [0, 3], "ranks that read data note how much"


@pytest.mark.slow
def test_exchanges_of_experts_have_a_row_beside_the_actions(tmp_path: Path) -> None:
    flags = f"{GPT}{PP2}{EP2}{EXPERTS}--global-batch-size 16 --pipeline-schedule 1f1b {PAIRS}"
    _, run = train(flags, tmp_path / "run")
    for rank in range(4):
        found = [span for span in spans(run, rank) if span.name == "exchange"]
        # A dispatch and a combine, forwards and backwards: two layers, four micro-batches.
        assert len(found) == 3 * 2 * 2 * 2 * 4
        assert {span.attributes["of"] for span in found} == {"F", "B"}
    output = tmp_path / "all.json"
    write_chrome_trace(run, output)
    events = json.loads(output.read_text())
    rows = {
        (event["cat"] == "exchange", event["tid"])
        for event in events
        if event["ph"] == "X"
    }
    assert rows == {(False, 0), (True, 1000)}
    predictions = forecast.predict(run).predictions
    assert any(prediction.all_to_all_hidden for prediction in predictions)


def test_a_run_in_slices_is_recorded_put_together_and_planned(tmp_path: Path) -> None:
    flags = f"{GPT}{PP2}--pipeline-schedule zb-h1 --pipeline-slices 4 "
    logs = run_script(
        2, "pretrain_gpt.py", [*flags.split(), "--trace", "--trace-dir", f"{tmp_path}"]
    )
    assert losses(logs) == losses(run_script(2, "pretrain_gpt.py", flags.split()))
    run = read_run(tmp_path)
    table = table_files.from_json((tmp_path / "schedule.json").read_text())
    for rank in range(2):
        found = sorted(
            (span.attributes["microbatch"], span.attributes.get("slice", 0))
            for span in spans(run, rank)
            if span.name == "forward"
        )
        row = [action for action in table.rows[rank] if action.kind == "F"]
        assert found == sorted(
            3 * [(action.microbatch, action.slice) for action in row]
        )
        [step] = run.surveys[rank].complete_steps[:1]
        assert step.peak_live == pytest.approx(measure(table).activations[rank])
        assert step.activation_bytes > 0
    output = tmp_path / "chrome.json"
    write_chrome_trace(run, output)
    events = json.loads(output.read_text())
    starts = [e["bind_id"] for e in events if e.get("flow_out")]
    assert len(starts) == len({*starts}) > 0, "an arrow for each slice's message"
    assert "planned: " in report.page(run)
    labels = [prediction.schedule for prediction in forecast.predict(run).predictions]
    assert {"1f1b", "zb-h1", "zb-h1 slices=4", "zb-v chunks=2 slices=4"} <= {*labels}


def _told(step: Iteration) -> bool:
    """Return whether an iteration tells how long the micro-batches of its forwards are."""
    sizes = step.figures.get("lengths", {})
    forwards = {
        str(s.attributes["microbatch"]) for s in step.spans if s.name == "forward"
    }
    assert all(size == [2 * 16, 2 * 16**2] for size in sizes.values()), (
        "tokens, sum of squares of [2, 16]"
    )
    return sizes.keys() == forwards


def test_followers_wait_for_their_leader_and_links_have_their_wire(
    tmp_path: Path,
) -> None:
    flags = (
        f"{GPT}{PP2}--tensor-model-parallel-size 2 --use-dpp --pipeline-transport tcp "
    )
    _, run = train(flags, tmp_path)
    causes = [
        {span.attributes["cause"] for span in spans(run, rank) if span.name == "wait"}
        for rank in range(4)
    ]
    assert "leader" in causes[1] | causes[3]
    assert "leader" not in causes[0] | causes[2]
    assert run.surveys[0].file.path.parent.name == tmp_path.name
    found = content(report.page(run))["links"]
    links = sorted((link["source"], link["target"], link["wire"]) for link in found)
    expected = [(0, 1), (0, 2), (1, 3), (2, 0), (2, 3), (3, 1)]  # 0 and 2 lead 1 and 3
    assert links == [(*link, "tcp") for link in expected]


@pytest.mark.parametrize("chunks", [1, 2])
def test_megatrons_own_schedules_are_recorded(
    tmp_path: Path, chunks: int, megatron_lm_path: Path
) -> None:
    interleaved = "--num-layers-per-virtual-pipeline-stage 1 " if chunks == 2 else ""
    _, run = train(f"{GPT}{PP2}{interleaved}", tmp_path)
    table = generate("interleaved", 2, 2, 2) if chunks == 2 else generate("1f1b", 2, 2)
    for survey, rank in zip(run.surveys, (0, 0, 1, 1), strict=True):
        for iteration in survey.file.iterations():
            actions = [
                (s.attributes["stage"], s.name, s.attributes["microbatch"])
                for s in sorted(iteration.spans, key=lambda span: span.begin_ns)
                if s.name in ("forward", "backward")
            ]
            kinds = {"F": "forward", "B": "backward"}
            assert actions == [
                (a.stage, kinds[a.kind], a.microbatch) for a in table.rows[rank]
            ]
    assert forecast.predict(run).measured == table.label


def test_iterations_have_megatrons_numbers(tmp_path: Path) -> None:
    flags = f"{GPT}--pipeline-schedule 1f1b {PP2}--iterations-to-skip 1 --log-interval 1 --trace "
    logs = run_script(
        2, "pretrain_gpt.py", [*flags.split(), "--trace-dir", str(tmp_path)]
    )
    logged = re.findall(r"iteration +(\d+)/", "".join(logs))
    assert len(logged) == 2, "of three one was skipped"
    for survey in read_run(tmp_path).surveys:
        assert [step.number for step in survey.steps] == [*map(int, logged)]


def test_upstreams_script_is_recorded(tmp_path: Path, megatron_lm_path: Path) -> None:
    _, run = train(f"{GPT}{PP2}--pipeline-schedule zb-h1 ", tmp_path)
    assert {
        "forward",
        "input_gradient",
        "weight_gradient",
        "reduce",
        "optimizer",
    } <= names(run, 0)
    assert [survey.num_iterations for survey in run.surveys] == [3] * 4


@pytest.mark.parametrize("schedule", ["", "--use-dpp "])
def test_a_batch_that_grows_is_planned_from_its_full_steps(
    tmp_path: Path, schedule: str, megatron_lm_path: Path
) -> None:
    calculator = (
        "megatron.core.num_microbatches_calculator:init_num_microbatches_calculator"
    )
    growing = "--rampup-batch-size 4 4 16 --global-batch-size 12 "
    if "step_batch_size_schedule" in parameters(
        calculator
    ):  # these releases do not ramp up
        growing = "--step-batch-size-schedule 0:4,128:8,256:12 "  # in tokens
    by_samples = re.sub(
        r"--(train-iters|lr-warmup-iters|global-batch-size) \d+ ", "", GPT
    )
    _, run = train(f"{by_samples}{PP4}--train-samples 40 {growing}{schedule}", tmp_path)
    for survey in run.surveys:
        assert [step.microbatches for step in survey.steps] == [2, 2, 4, 6, 6]
        assert [step.number for step in survey.complete_steps] == [4, 5]
        assert survey.num_sampled == 2
    assert any("do not count: 2 of 2, 1 of 4" in note for note in run.notes)
    found = forecast.predict(run)
    steps = [max(s.steps[index].duration_ns for s in run.surveys) for index in (3, 4)]
    assert found.measured_s == pytest.approx(sum(steps) / 2e9)


def not_observed() -> list[str]:
    """Return the classes of transport and observers when nobody observes."""
    import torch

    from megatron_ext.runtime import entry, runtime
    from tests.runtime import toy

    found: list[str] = []
    executor = runtime.Executor

    def told(**fields: Any) -> Any:
        listening = [fields["transport"], *fields["observers"]]
        found.extend(type(each).__name__ for each in listening)
        return executor(**fields)

    runtime.Executor = told  # this process is a rank and ends
    from tests.pipelines import make_pipeline, use

    toy.start(2)
    use(make_pipeline("1f1b", 2, 2))
    subscribe(active.required())
    entry.forward_backward(
        forward_step_func=toy.forward_step,
        data_iterator=toy.samples(2),
        model=toy.chunks(toy.config(), [torch.distributed.get_rank()]),
        num_microbatches=2,
        seq_length=toy.LENGTH,
        micro_batch_size=toy.BATCH,
    )
    return found


@pytest.mark.short_s(4)
def test_without_the_flags_nothing_of_ours_takes_part() -> None:
    assert run_ranks(2, not_observed) == [["TorchTransport", "Measured"]] * 2


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"trace": False, "trace_dir": Path("x")},
            "--trace-dir requires --trace; add --trace",
        ),
        ({"trace": True, "trace_interval": 0}, "--trace-interval 0 must be at least 1"),
        ({"trace": True, "trace_interval": 3, "trace_iterations": 4}, "between 1 and"),
        (
            {"trace": True, "trace_iterations": 0},
            "--trace-iterations 0 must be between 1",
        ),
        ({"hang_timeout": -1.0}, "--hang-timeout -1.0 must be a positive number"),
        (
            {"hang_timeout": float("nan")},
            "--hang-timeout nan must be a positive number",
        ),
    ],
)
def test_impossible_flags_are_refused(said: dict[str, Any], message: str) -> None:
    empty = dict.fromkeys(("trace_interval", "trace_iterations", "trace_dir"))
    with pytest.raises(ArgumentsError, match=message):
        preflight({**empty, **said}).raise_refusals()


def test_numbers_that_are_not_said_fit_those_that_are() -> None:
    def found(interval: int | None, iterations: int | None) -> tuple[int, int]:
        said = {
            "trace_interval": interval,
            "trace_iterations": iterations,
            "trace_dir": None,
        }
        tracing = pipeline_config(Namespace(trace=True, **said)).tracing
        assert tracing is not None
        return tracing.interval, tracing.num_iterations

    assert found(None, None) == (100, 10)
    assert found(5, None) == (5, 5)
    assert found(None, 300) == (300, 300)
    assert pipeline_config(Namespace()).tracing is None


def test_a_folder_that_cannot_be_written_ends_the_run_in_one_line(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    argv = [
        *GPT.split(),
        *PP2.split(),
        "--trace",
        "--trace-dir",
        str(tmp_path / "file" / "run"),
    ]
    run = start_script(2, "pretrain_gpt.py", argv)
    assert 2 in run.exit_codes, run.describe()
    text = "\n".join(run.logs)
    assert "--trace cannot write" in text
    assert "Traceback" not in text


def test_forward_and_backward_ranks_have_a_row_each(tmp_path: Path) -> None:
    _, run = train(f"{GPT}{PP2}--forward-backward-disaggregating ", tmp_path)
    assert sorted(survey.header.pipeline for survey in run.surveys) == [0, 1, 2, 3]
    assert [survey.header.rank for survey in run.surveys] == [0, 1, 2, 3]
    by_row = {
        each.header.pipeline: names(run, each.header.rank) for each in run.surveys
    }
    assert all("weights" in found for found in by_row.values())
    assert "backward" not in by_row[0] | by_row[1]
    assert "backward" in by_row[2] & by_row[3]
    settings = run.settings
    assert (settings["pipeline_schedule"], settings["transport"]) == ("fbd", "auto")


def test_merged_forward_ranks_are_all_that_there_are(tmp_path: Path) -> None:
    flags = (
        f"{GPT}--pipeline-model-parallel-size 1 --tensor-model-parallel-size 2 "
        "--forward-backward-disaggregating --ignore-forward-tensor-parallel --trace --trace-dir "
    )
    run_script(3, "pretrain_gpt.py", [*flags.split(), str(tmp_path)])
    run = read_run(tmp_path)
    assert [survey.header.rank for survey in run.surveys] == [0, 1, 2]
    assert not [note for note in run.notes if "have no trace" in note]
