"""Numbers and files that nobody should give: one line, exit code 2, no traceback, bounded time."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext import cli
from megatron_ext.errors import ArgumentsError
from megatron_ext.planning.hardware import DeviceKind, parse_devices
from megatron_ext.planning.model_flags import sizes_of_flags
from megatron_ext.planning.model_source import read_model
from megatron_ext.tracing.records import SCHEDULE_FILE
from tests.tools.trace.runs import trace_of, write_run

pytestmark = pytest.mark.timeout(60)

NUMBERS = ("0", "-1", "nan", "inf", "1e308", "9" * 30, "", "½")
SIZES = {
    "--pp": "4",
    "--microbatches": "8",
    "--chunks": "2",
    "--costs": "1,1,1",
    "--comm": "0",
}
ARENAS = {
    "--pp": "4", "--microbatches": "8", "--seq-length": "8", "--micro-batch-size": "1",
    "--hidden-size": "8", "--preflight-timeout": "5",
}  # fmt: skip
JOB = {
    "--nproc": "1", "--num-microbatches": "4", "--master-port": "29501", "--grace": "1",
    "--preflight-timeout": "5",
}  # fmt: skip
MODEL = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --vocab-size 128"
COMMANDS: dict[str, tuple[list[str], dict[str, str], list[str]]] = {
    "plan": (["plan", "--schedule", "interleaved"], SIZES, []),
    "plan all": (["plan", "--use-dpp"], {k: v for k, v in SIZES.items() if k != "--chunks"}, []),
    "plan --trace-dir": (["plan", "--trace-dir", "RUN"], {"--memory-gib": "1"}, []),
    "plan --devices": (
        ["plan"],
        {
            "--devices": "8xh100", "--global-batch-size": "64", "--seq-length": "4096",
            "--memory-gib": "80",
        },
        ["--", *MODEL.split()],
    ),
    "plot": (["plot", "interleaved", "zb-v"], {**SIZES, "--chunks": "2"}, []),
    "aggregate": (
        ["aggregate", "--trace-dir", "RUN"], {}, []
    ),
    "doctor": (["doctor"], ARENAS, []),
    "launch": (
        ["launch", "--hostfile", "HOSTS", "--dry-run"],
        JOB,
        ["--", "pretrain_gpt.py", "--micro-batch-size", "1"],
    ),
}  # fmt: skip
FINE = {
    "--comm": ("0",),
    "--grace": ("0",),
    "--preflight-timeout": ("0",),
    "--memory-gib": ("1e308", "9" * 30),
}
"""Values of the list that mean something."""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a traced run."""
    return write_run(tmp_path_factory.mktemp("traces"))


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """A hostfile."""
    path = tmp_path / "hosts"
    path.write_text("localhost slots=1\n")
    return path


def outcome(arguments: list[str]) -> int:
    """Return the exit code of a command; an exception of it fails the test."""
    try:
        return cli.main(arguments)
    except SystemExit as error:  # of argparse
        return int(error.code or 0)


def assert_refused(code: int, captured: pytest.CaptureFixture[str]) -> None:
    out, err = captured.readouterr()
    told = [line for line in err.splitlines() if "error: " in line]
    assert (code, len(told)) == (2, 1), out + err
    assert len(told[0]) < 1000


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("command", "flag"),
    [(name, flag) for name, (_, flags, _) in COMMANDS.items() for flag in flags],
)
def test_numbers(
    capsys: pytest.CaptureFixture[str],
    run_folder: Path,
    hosts: Path,
    command: str,
    flag: str,
    number: str,
) -> None:
    if number in FINE.get(flag, ()):
        pytest.skip("means something")
    begin, flags, rest = COMMANDS[command]
    places = {"RUN": str(run_folder), "HOSTS": str(hosts)}
    given = {**flags, flag: f"1,{number},1" if flag == "--costs" else number}
    sizes = [f"{name}={value}" for name, value in given.items()]
    assert_refused(
        outcome([places.get(word, word) for word in begin] + sizes + rest), capsys
    )


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _truncated(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: min(100, 2 * len(content) // 3)])


def _flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[::7] = bytes(byte ^ 0x55 for byte in content[::7])
    path.write_bytes(content)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _nested(path: Path) -> None:
    path.write_text("[" * 100_000 + "]" * 100_000)


def _too_deep(path: Path) -> None:
    """Few enough brackets for Python to parse, and more than any reader wants."""
    path.write_text('{"name":' + "[" * 300 + "]" * 300 + "}")


def _unreadable(path: Path) -> None:
    path.unlink()
    path.symlink_to("/proc/self/mem")


DAMAGE = (
    _empty,
    _truncated,
    _flipped,
    _directory,
    _pipe,
    _endless,
    _nested,
    _too_deep,
    _unreadable,
)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("command", ["plan", "plot", "doctor"])
def test_tables(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: str,
    damage: Callable[[Path], None],
) -> None:
    path = tmp_path / "table.csv"
    cli.main(["plot", "zb-v", "--pp", "4", "--microbatches", "8", "-o", str(path)])
    capsys.readouterr()
    damage(path)
    named = [f"csv:{path}"] if command == "plot" else ["--schedule", f"csv:{path}"]
    sizes = (
        [f"{flag}={value}" for flag, value in ARENAS.items()]
        if command == "doctor"
        else []
    )
    assert_refused(outcome([command, *named, *sizes]), capsys)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", ["schedule", "traces"])
@pytest.mark.parametrize(
    "command", ["plan --trace-dir", "aggregate --trace-dir", "report"]
)
def test_traces(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: str,
    file: str,
    damage: Callable[[Path], None],
) -> None:
    """A Chrome trace needs no table; all else is needed."""
    directory = write_run(tmp_path)
    paths = [directory / SCHEDULE_FILE]
    if file == "traces":
        paths = [trace_of(directory, rank) for rank in range(4)]
    for path in paths:
        damage(path)
    code = outcome([*command.split(), str(directory)])
    if file == "schedule" and command != "plan --trace-dir" and code == 0:
        return
    assert_refused(code, capsys)


@pytest.mark.parametrize(
    "damage", [damage for damage in DAMAGE if damage not in (_nested, _too_deep)]
)
@pytest.mark.parametrize("command", ["launch", "doctor"])
def test_hostfiles(
    capsys: pytest.CaptureFixture[str],
    hosts: Path,
    command: str,
    damage: Callable[[Path], None],
) -> None:
    damage(hosts)
    rest = ["--dry-run", "--", "pretrain_gpt.py"] if command == "launch" else []
    assert_refused(outcome([command, "--hostfile", str(hosts), *rest]), capsys)


CONFIG = {
    "model_type": "deepseek_v3", "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 128,
    "intermediate_size": 128, "num_attention_heads": 4, "moe_intermediate_size": 32,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
DEVICE = {"base": "h100", "memory_gib": 80}
NAMED_FILES = {
    "config.json": (
        json.dumps(CONFIG),
        "plan --devices 8xh100 --global-batch-size 8 --seq-length 64 --model {}",
    ),
    "device.json": (
        json.dumps(DEVICE),
        "plan --devices 8x{} --global-batch-size 8 --seq-length 64 -- " + MODEL,
    ),
    "lengths.jsonl": (
        "5\n7\n" * 4,
        "plan --schedule 1f1b --pp 2 --microbatches 2 --max-tokens 8 --hidden-size 8 --lengths {}",
    ),
}
"""Files that a flag names: what a good one holds, and the command that reads it."""


@pytest.mark.parametrize("name", NAMED_FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_files_that_flags_name(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
    damage: Callable[[Path], None],
) -> None:
    path = tmp_path / name
    content, command = NAMED_FILES[name]
    path.write_text(content)
    words = command.format(path).split()
    assert outcome(words) == 0, (
        "the command is right, so what follows is about the file"
    )
    capsys.readouterr()
    damage(path)
    code = outcome(words)
    if name == "lengths.jsonl" and damage is _truncated and code == 0:
        return  # the lines before the cut are lengths
    assert_refused(code, capsys)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner)
    ),
    max_leaves=4,
)
ODD = JSON | st.sampled_from([10**30, -1, 0, 10**9, 1e308, "9" * 5000, [[]] * 2000])


@settings(max_examples=150, deadline=None)
@given(
    key=st.sampled_from(
        [*CONFIG, "layer_types", "mlp_only_layers", "decoder_sparse_step"]
    ),
    odd=ODD,
)
def test_sizes_of_a_configuration(key: str, odd: object) -> None:
    """A value that no model has is refused, and neither fills the memory nor takes for ever."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(CONFIG | {key: odd}))
        with suppress(ArgumentsError):
            assert 1 <= read_model(path, None, []).num_layers <= 1024


@settings(max_examples=150, deadline=None)
@given(
    key=st.sampled_from([field.name for field in fields(DeviceKind)] + ["base"]),
    odd=ODD,
)
def test_numbers_of_a_device(key: str, odd: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.json"
        path.write_text(json.dumps(DEVICE | {key: odd}))
        with suppress(ArgumentsError):
            _, device = parse_devices(f"8x{path}")
            assert device.memory_gib > 0


@pytest.mark.parametrize(
    "text",
    [
        "([0]*100000000)",
        "(" * 5000,
        "[1]+" * 5000 + "[1]",
        "not " * 5000 + "1",
        "9" * 5000,
    ],
)
def test_expressions_of_layers(text: str) -> None:
    flags = [*MODEL.split(), "--num-experts", "4", "--moe-layer-freq", text]
    with pytest.raises(
        ArgumentsError, match=r"--moe-layer-freq .* does not describe 8 layers"
    ):
        sizes_of_flags(flags, "flags")
