"""Errors of some ranks, before and after these are connected: one line, and nobody waits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext.upstream import failure, releases
from megatron_ext.upstream import tree as upstream
from tests.commands import run_python
from tests.ports import free_port
from tests.ranks import RankRun, start_script
from tests.upstream_script.runs import GPT

needs_loop = pytest.mark.skipif(
    not releases.has_training() and upstream.find_tree() is None,
    reason="megatron-core 0.16 needs MEGATRON_LM_PATH for megatron.training",
)
PP2 = GPT + "--pipeline-model-parallel-size 2 "
CSV = "0F0,0B0\n1F0,1B0\n"


def errors(ended: RankRun) -> list[str]:
    """Return the lines about errors in all logs; there must be nothing else to read."""
    lines = "".join(ended.logs).splitlines()
    assert not any(line.startswith("Traceback") for line in lines), ended.describe()
    return [line for line in lines if "megatron_ext: error: " in line]


def start(flags: str) -> RankRun:
    return start_script(2, "pretrain_gpt.py", flags.split(), timeout_s=240)


@needs_loop
def test_a_package_that_only_the_last_rank_imports() -> None:
    ended = start(PP2 + "--wandb-project p --wandb-exp-name x")
    [line] = errors(ended)
    assert "imports wandb, which is not installed" in line
    assert ended.exit_codes[1] == 2


@needs_loop
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            PP2 + "--save nowhere",
            "error: --save-interval is missing: Megatron needs it with --save",
        ),
        (
            GPT
            + "--tensor-model-parallel-size 2 --num-attention-heads 5 --hidden-size 40",
            "Megatron-LM refused the arguments: num_attention_heads (5) must be a multiple of",
        ),
        (
            PP2 + "--pipeline-shedule zb-v --use-dp 3",
            "--pipeline-shedule; did you mean --pipeline-schedule? unknown argument --use-dp; did",
        ),
        (
            PP2 + "--seq-length long",
            "error: --seq-length is 'long'; it must be a whole number",
        ),
    ],
    ids=["arguments", "TransformerConfig", "unknown flags", "no number"],
)
def test_an_error_of_all_ranks_is_one_line(flags: str, reason: str) -> None:
    ended = start(flags)
    [line] = errors(ended)
    assert reason in line
    assert ended.exit_codes == [2, 2]


@needs_loop
def test_a_checkpoint_of_another_format_is_one_line(tmp_path: Path) -> None:
    saving = f"--save {tmp_path} --save-interval 1 --train-iters 1 --ckpt-format torch"
    saved = start(PP2 + saving)
    assert saved.exit_codes == [0, 0], saved.describe()
    flags = f"{PP2}--pipeline-schedule zb-v --load {tmp_path} --auto-detect-ckpt-format"
    [line] = errors(start(flags))
    mine = "ranks 0: 0 and 3, 1: 1 and 2 of Et|t|t|tL (2 per rank)"
    assert f"are Megatron's own (1 per rank), but this run's stages are {mine}" in line


@needs_loop
def test_a_file_that_one_host_lacks_ends_both(tmp_path: Path) -> None:
    tables = [tmp_path / "first" / "table.csv", tmp_path / "second" / "table.csv"]
    for table in tables:
        table.parent.mkdir()
    tables[0].write_text(CSV)
    port = str(free_port())
    hosts = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                *("--node-rank", str(rank), "--nproc-per-node", "1"),
                *("--master-addr", "localhost", "--master-port", port),
                *("-m", "megatron_ext", "pretrain_gpt.py", *PP2.split()),
                *("--micro-batch-size", "8", "--pipeline-schedule", "csv:table.csv"),
            ],
            cwd=table.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, table in enumerate(tables)
    ]
    try:
        logs = [host.communicate(timeout=150)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    for log, count in zip(logs, (1, 1), strict=True):
        lines = [
            line
            for line in log.splitlines()
            if line.startswith("megatron_ext: error: ")
        ]
        assert len(lines) == count, log
        assert "table.csv" in lines[0]
    assert "rank 1 on " in logs[0]
    # The report of torchrun itself, which only `megatron-ext launch` leaves out.
    assert re.search(r"^  traceback : .*table\.csv", logs[1], re.MULTILINE)


REPORT = """
from megatron_ext.errors import UserError
from megatron_ext.upstream import failure
failure.report(UserError("no such schedule"))
"""
RANKS = f"""
import os, sys
pids = []
for rank in range(4):
    pids.append(os.fork())
    if not pids[-1]:
        exec({REPORT!r})
        os._exit(0)
for pid in pids:
    os.waitpid(pid, 0)
"""


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        ("UserError('no')", "megatron_ext: error: no\n", 2),
        ("KeyError(1)", "KeyError: 1\n", 1),
    ],
)
def test_a_rank_that_ends_slowly_keeps_its_exit_code(
    tmp_path: Path, error: str, line: str, code: int
) -> None:
    script = tmp_path / "fail.py"
    script.write_text(
        "import atexit, time\nfrom megatron_ext.errors import UserError\n"
        f"atexit.register(time.sleep, 3)\nraise {error}\n"
    )
    command = [sys.executable, "-m", "megatron_ext", str(script)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as rank:
        assert rank.stderr is not None
        while rank.stderr.readline() != line:
            assert rank.poll() is None, "it ended before its reason was out"
        rank.terminate()  # as a launcher does that has seen another rank end
        assert rank.wait(timeout=60) == code


def test_ranks_of_one_launcher_report_an_error_once() -> None:
    ended = run_python(
        "-c", f"import megatron_ext.upstream.failure\n{RANKS}", WORLD_SIZE="4"
    )
    assert ended.stderr == "megatron_ext: error: no such schedule\n"


def test_a_rank_that_fails_after_the_first_has_ended_does_not_repeat_its_line(
    tmp_path: Path,
) -> None:
    for rank, printed in enumerate(["megatron_ext: error: no such schedule\n", ""]):
        path = tmp_path / str(rank) / "error.json"
        path.parent.mkdir()
        ended = run_python(
            "-c",
            REPORT,
            WORLD_SIZE="2",
            RANK=str(rank),
            TORCHELASTIC_ERROR_FILE=str(path),
        )
        assert ended.stderr == printed


def test_ranks_that_cannot_know_of_each_other_all_report() -> None:
    ended = run_python("-c", REPORT, WORLD_SIZE="2", RANK="1")
    assert ended.stderr == "megatron_ext: error: no such schedule\n"


def test_an_interrupt_without_save_counts_no_checkpoint_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latest_checkpointed_iteration.txt").write_text("90")
    args = SimpleNamespace(curr_iteration=3, save=None, load=None)
    variables = SimpleNamespace(_GLOBAL_ARGS=args)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", variables)
    monkeypatch.setenv("RANK", "0")
    failure.report_interrupt()
    assert "interrupted at iteration 3; nothing was saved" in capsys.readouterr().err
    # A launcher need not see the folder of its hosts.
    assert (
        failure.to_resume("nowhere", None) == "no checkpoint in nowhere on this machine"
    )
