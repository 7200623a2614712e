"""Jobs of `megatron-ext launch` that fail at random points: the last line names the cause.

A fault strikes one rank of a small training: an exception or a NaN in the model, a hook, the data,
the loss or the optimizer, a signal, an exit, a rank that stops, or a missing file;
over every wire, under our schedules and Megatron's own.

    FAILING_JOBS=0:300 pytest -m slow tests/hangs/test_failing_jobs.py    seeds of the jobs

One job takes 15 to 25 s of a core.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ranks import require_training
from tests.upstream_script.runs import GPT

_TIMEOUT_S = 400
_SCHEDULES = ("1f1b", "zb-h1", "zb-v", "interleaved", "")
_WIRES = ("shm", "tcp", "torch")
_SIGNALS = ("SIGKILL", "SIGSEGV", "SIGTERM", "SIGABRT", "SIGBUS")
_KINDS = ("raise", "nan", "signal", "exit", "stop", "sleep", "missing")
_DEFAULT = "0:28"

SCRIPT = """
import json, os, signal, sys, time
import torch
from megatron_ext.training import runner

fault = json.loads(os.environ["FAULT"])
calls = 0


def strike(*_):
    global calls
    calls += 1
    kind, detail = fault["kind"], fault["detail"]
    if detail == "always" and calls > fault["call"]:
        return True
    if calls != fault["call"]:
        return False
    if kind == "raise":
        raise ValueError(detail)
    if kind == "signal":
        os.kill(os.getpid(), getattr(signal, detail))
    if kind == "exit":
        sys.exit(5) if detail == "sys.exit" else os._exit(5)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind in ("signal", "sleep"):
        time.sleep(1000)
    return kind == "nan"


def before(owner, name):
    original = getattr(owner, name)

    def struck(*args, **kwargs):
        strike()
        return original(*args, **kwargs)

    setattr(owner, name, struck)


def inject(place):
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    if place == "data":
        before(GPTDataset, "__getitem__")
    elif place == "optimizer":
        before(FP32Optimizer, "prepare_grads")
    elif place == "model":
        before(TransformerLayer, "forward")
    else:
        original = TransformerLayer.__init__

        def spoil_output(_layer, _inputs, outputs):
            if strike():
                with torch.no_grad():
                    outputs[0].fill_(float("nan"))

        def spoil_gradient(gradient):
            return gradient * float("nan") if strike() else None

        def hooked(self, *args, **kwargs):
            original(self, *args, **kwargs)
            if place == "gradient":
                self.input_layernorm.weight.register_hook(spoil_gradient)
            else:
                self.register_forward_hook(spoil_output)

        TransformerLayer.__init__ = hooked


if int(os.environ["RANK"]) == fault["rank"]:
    inject(fault["place"])
runner.execute(runner.choose("pretrain_gpt.py"))
"""


@dataclass(frozen=True)
class Fault:
    """One job and what strikes it, drawn by a seed."""

    seed: int
    kind: str
    place: str
    detail: str
    rank: int
    call: int
    """The call of the place that is struck, from 1."""
    schedule: str
    wire: str

    @classmethod
    def drawn(cls, seed: int) -> Fault:
        """Draw a job; consecutive seeds have all kinds of faults and wires."""
        draw = random.Random(seed)
        kind = _KINDS[seed % len(_KINDS)]
        wire = _WIRES[seed // len(_KINDS) % len(_WIRES)]
        schedule = draw.choice(_SCHEDULES)
        place = draw.choice(("model", "hook", "data", "optimizer"))
        rank = draw.randrange(2)
        detail = ""
        if kind == "raise":
            detail = f"the fault of seed {seed}"
        elif kind == "nan":
            place, detail = (
                draw.choice(("hook", "gradient")),
                draw.choice(("once", "always")),
            )
        elif kind == "signal":
            detail = draw.choice(_SIGNALS)
        elif kind == "exit":
            detail = draw.choice(("sys.exit", "os._exit"))
        elif kind == "missing":
            place, detail = "files", draw.choice(("checkpoint", "data", "tokenizer"))
        elif kind == "sleep" and not schedule:
            schedule = "1f1b"  # Megatron's own has no watchdog
        # Only the first rank reads data under every placement.
        rank = 0 if place == "data" else rank
        call = draw.randint(2, 3) if place == "optimizer" else draw.randint(9, 16)
        return cls(seed, kind, place, detail, rank, call, schedule, wire)

    @property
    def flags(self) -> str:
        """The flags of the training script."""
        flags = f"{GPT} --train-iters 4 --pipeline-model-parallel-size 2 "
        # An exception in a worker reaches its rank; any other fault would strike the worker alone.
        has_workers = self.seed % 2 and (self.place != "data" or self.kind == "raise")
        flags += f"--distributed-timeout-minutes 1 --num-workers {int(has_workers)} "
        if self.schedule:
            flags += (
                f"--pipeline-schedule {self.schedule} --pipeline-transport {self.wire} "
            )
        if self.schedule and self.kind in ("stop", "sleep"):
            flags += "--hang-timeout 15 "
        if self.detail == "always":  # Megatron saves before it gives up
            flags += "--save saved --save-interval 100 "
        if self.detail == "checkpoint":
            flags += "--load nowhere --exit-on-missing-checkpoint "
        elif self.detail == "data":
            flags = flags.replace("--mock-data", "--data-path nowhere/text_document")
        elif self.detail == "tokenizer":
            flags = flags.replace("NullTokenizer --vocab-size 127", "GPT2BPETokenizer")
            flags += "--vocab-file nowhere/vocab.json --merge-file nowhere/merges.txt "
        return flags

    @property
    def last_line(self) -> str:
        """The pattern of the last line."""
        ended = f"rank {self.rank} ended with exit code"
        if self.kind == "raise":
            return rf"{ended} 1 in iteration \d: ValueError: {self.detail}; "
        if self.kind == "nan" and self.place == "gradient":
            code = 16 if self.detail == "always" else r"\d+"
            return rf"{ended} {code} in iteration \d: found NaN in local grad norm .*result: nan"
        if self.kind == "nan":
            last = 0 if self.schedule == "zb-v" else 1
            code = 16 if self.detail == "always" else r"\d+"
            ended = f"rank {last} ended with exit code"
            return rf"{ended} {code} in iteration \d: found NaN in local forward loss"
        if self.kind == "signal":
            return rf"rank {self.rank} was killed by {self.detail} (in|after) iteration \d; "
        if self.kind == "exit":
            place = r": sys\.exit\(5\) at pretrain_faulty\.py:\d+"
            if self.detail != "sys.exit":
                place = ""
            return rf"{ended} 5 (in|after) iteration \d{place}; "
        if self.kind == "stop":
            return rf"rank {self.rank} makes no progress in iteration \d: its process \d+ is"
        if self.kind == "sleep":
            return rf"rank {self.rank} holds the job up in iteration \d: .*strike"
        return {
            "checkpoint": r"rank \d ended with exit code 1.* did not load the checkpoint.*\.py:\d+",
            "data": r"rank \d ended with .*nowhere/text_document",
            # Without the files, releases since 0.19 ask the hub for the tokenizer named gpt2.
            "tokenizer": r"rank \d ended with .*(nowhere/vocab\.json|AutoTokenizer for gpt2)",
        }[self.detail]


def run_job(fault: Fault, directory: Path) -> tuple[int, str]:
    """Run the job; return its exit code and all that it has said."""
    (directory / "pretrain_faulty.py").write_text(SCRIPT)
    temporary = directory / "temporary"
    temporary.mkdir()
    command = [
        *(
            sys.executable,
            "-m",
            "megatron_ext",
            "launch",
            "--nproc",
            "2",
            "--grace",
            "1",
        ),
        *("--env", f"FAULT={json.dumps(asdict(fault))}", "--"),
        *("pretrain_faulty.py", *fault.flags.split()),
    ]
    variables: dict[str, Any] = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "MEGATRON_EXT_RUNS": str(directory / "runs"),
        "MEGATRON_EXT_DEVICE": "cpu",
        "TMPDIR": str(temporary),
    }
    done = subprocess.run(
        command,
        cwd=directory,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return done.returncode, done.stdout


def _processes_in(directory: Path) -> list[psutil.Process]:
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended meanwhile, or is another user's
            if process.cwd() == str(directory):
                processes.append(process)
    return processes


def _seeds() -> list[int]:
    first, _, end = os.environ.get("FAILING_JOBS", _DEFAULT).partition(":")
    return list(range(int(first), int(end)))


@pytest.mark.slow
@pytest.mark.timeout(580)
@pytest.mark.parametrize("seed", _seeds())
def test_the_last_line_of_a_failed_job_names_the_cause(
    seed: int, tmp_path: Path
) -> None:
    require_training()
    fault = Fault.drawn(seed)
    code, output = run_job(fault, tmp_path)
    told = f"{fault}\n{output[-6000:]}"
    last_line = output.splitlines()[-1]
    assert re.search(f"failed first: localhost: {fault.last_line}", last_line), told
    log = Path(last_line.rpartition("everything: ")[2])
    assert log.is_file(), told
    assert _processes_in(tmp_path) == [], told
    assert list((tmp_path / "temporary").glob("pymp-*")) == [], told
    assert code != 0, told


def test_the_default_seeds_have_every_kind_of_fault_and_wire() -> None:
    drawn = [Fault.drawn(seed) for seed in range(28)]
    assert {fault.kind for fault in drawn} == set(_KINDS)
    assert {(fault.kind, fault.wire) for fault in drawn} >= {
        (kind, wire) for kind in _KINDS for wire in _WIRES
    }
    assert {fault.rank for fault in drawn} == {0, 1}
    assert signal.SIGSTOP.name not in {fault.detail for fault in drawn}
