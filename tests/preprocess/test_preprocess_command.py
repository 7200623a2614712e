"""The whole command: round trips, upstream's bytes, workers, interruption, bad input."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ext import cli
from tests.tiers import first_quick

REPO = Path(__file__).parents[2]
BYTES = ("--tokenizer-type", "ByteLevelTokenizer")
TEXTS = [
    "The first document.",
    "",
    "Zürich, 日本語 and \0 bytes.\n\nA second paragraph.",
    "x" * 5000,
]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def preprocess(*args: object) -> int:
    return cli.main(["preprocess", *map(str, args)])


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "megatron_ext", "preprocess", *map(str, args)]


def documents(prefix: str) -> list[list[list[int]]]:
    """Reads a dataset back with megatron.core: documents of sentences of token ids."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix)
    ends = dataset.document_indices.tolist()
    return [
        [dataset[i].tolist() for i in range(first, last)]
        for first, last in itertools.pairwise(ends)
    ]


def contents(folder: Path, prefix: str) -> dict[str, bytes]:
    return {path.suffix: path.read_bytes() for path in folder.glob(f"{prefix}_*")}


def test_text_survives_the_round_trip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert preprocess("--input", source, "--output-prefix", tmp_path / "p", *BYTES) == 0
    read = documents(f"{tmp_path}/p_text_document")
    assert [b"".join(map(bytes, document)).decode() for document in read] == TEXTS
    assert f"4 documents (1 empty), {sum(len(t.encode()) for t in TEXTS)} tokens" in (
        capsys.readouterr().out
    )


@settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))
@given(st.lists(st.text(max_size=40), min_size=1, max_size=6).filter(any), st.booleans())
def test_any_text_survives_the_round_trip(texts: list[str], append_eod: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = write_jsonl(Path(folder) / "a.jsonl", texts)
        eod = ["--append-eod"] if append_eod else []
        assert preprocess("--input", source, "--output-prefix", f"{folder}/p", *BYTES, *eod) == 0
        end = [0] if append_eod else []
        assert documents(f"{folder}/p_text_document") == [
            [list(text.encode()) + end] if text else [] for text in texts
        ]


def test_sentences_go_to_a_dataset_of_their_own_name(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("One. Two.\n\nThree.\n")
    flags = ["--split-sentences", "--txt-documents", "paragraph"]
    assert preprocess("--input", source, "--output-prefix", tmp_path / "p", *BYTES, *flags) == 0
    read = documents(f"{tmp_path}/p_text_sentence")
    assert [[bytes(s).decode() for s in document] for document in read] == [
        ["One.", "Two."],
        ["Three."],
    ]


def hugging_face_tokenizer(folder: Path) -> Path:
    """Trains a small byte-level BPE tokenizer, so that ids are not bytes."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(TEXTS, vocab_size=300, special_tokens=["<|end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<|end|>")
    fast.save_pretrained(str(folder / "tokenizer"))
    return folder / "tokenizer"


@pytest.mark.tree
@pytest.mark.parametrize("tokenizer", first_quick(["null", "hugging-face"]))
def test_the_bytes_are_those_of_upstreams_tool(
    tmp_path: Path, megatron_lm_path: Path, tokenizer: str
) -> None:
    if tokenizer == "null":
        flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "70000"]
        source = write_jsonl(tmp_path / "a.jsonl", ["1 2 3", "65535", "69999 0"])
    else:
        model = hugging_face_tokenizer(tmp_path)
        flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(model)]
        source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    flags += ["--input", str(source), "--append-eod"]
    # The tool imports all of megatron.training, which a machine without GPU needs our patches for.
    tool = [
        sys.executable,
        "-m",
        "megatron_ext",
        str(megatron_lm_path / "tools/preprocess_data.py"),
    ]
    theirs = [*tool, *flags, "--workers", "1", "--output-prefix", f"{tmp_path}/theirs"]
    subprocess.run(theirs, cwd=REPO, check=True, timeout=240)
    assert preprocess(*flags, "--output-prefix", tmp_path / "ours") == 0
    ours = contents(tmp_path, "ours")
    assert set(ours) == {".bin", ".idx"}
    assert ours == contents(tmp_path, "theirs")


@pytest.fixture(scope="module")
def large_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "large.jsonl"
    with path.open("w") as stream:
        for number in range(300):
            stream.write(json.dumps({"text": f"{number} " + "words and more words " * 5000}) + "\n")
    return path


def test_workers_write_the_same_bytes(tmp_path: Path, large_corpus: Path) -> None:
    flags = ["--input", large_corpus, "--append-eod", *BYTES]
    for workers in (1, 3):
        prefix = f"{tmp_path}/w{workers}"
        subprocess.run(
            command(*flags, "--output-prefix", prefix, "--workers", workers),
            cwd=REPO,
            check=True,
            timeout=240,
        )
    assert contents(tmp_path, "w3") == contents(tmp_path, "w1")


def test_a_bad_document_in_a_worker_is_named(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["x"])
    with source.open("a") as stream:
        stream.write("{broken\n")
    flags = ["--input", source, "--output-prefix", tmp_path / "p", "--workers", "2", *BYTES]
    done = subprocess.run(command(*flags), cwd=REPO, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert f"{source}:2: not valid JSON" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def session_members(session: int) -> dict[int, int]:
    """Processes of a session: pid -> parent's pid."""
    members = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # gone meanwhile
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            members[int(stat.parent.name)] = int(fields[1])
    return members


def workers_of(main: int) -> list[int]:
    """Workers are the grandchildren: the fork server stands between."""
    members = session_members(main)
    return [pid for pid, parent in members.items() if members.get(parent) == main]


@pytest.fixture
def running(tmp_path: Path, large_corpus: Path) -> Iterator[subprocess.Popen[str]]:
    """The command with two workers, in a session of its own, when it has just started to write."""
    flags = ["--input", *[large_corpus] * 10, "--output-prefix", tmp_path / "p", "--workers", "2"]
    with subprocess.Popen(
        command(*flags, *BYTES), cwd=REPO, start_new_session=True, text=True, stderr=subprocess.PIPE
    ) as process:
        wait_until(lambda: bool(list(tmp_path.iterdir())) and len(workers_of(process.pid)) == 2)
        yield process
        for pid in session_members(process.pid):
            os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize("number", first_quick([signal.SIGINT, signal.SIGTERM]))
def test_a_signal_ends_everything_and_leaves_nothing(
    tmp_path: Path, running: subprocess.Popen[str], number: signal.Signals
) -> None:
    running.send_signal(number)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 128 + number
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
    wait_until(lambda: not session_members(running.pid))


def test_workers_do_not_outlive_a_killed_parent(running: subprocess.Popen[str]) -> None:
    running.kill()
    wait_until(lambda: not session_members(running.pid))


def test_a_killed_worker_is_reported(tmp_path: Path, running: subprocess.Popen[str]) -> None:
    os.kill(workers_of(running.pid)[0], signal.SIGKILL)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 2
    assert "preprocessing workers exited early" in errors
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_gets_a_progress_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    control, terminal = pty.openpty()
    with os.fdopen(control, "rb", buffering=0) as screen:
        with os.fdopen(terminal, "w") as stderr:
            monkeypatch.setattr(sys, "stderr", stderr)
            assert preprocess("--input", source, "--output-prefix", tmp_path / "p", *BYTES) == 0
        assert b"4 documents" in _all_of(screen)


def _all_of(screen: io.FileIO) -> bytes:
    """What was written to a terminal that is closed now: one read returns a frame or more."""
    shown = b""
    with contextlib.suppress(OSError):  # EIO ends a terminal
        while more := screen.read(65536):
            shown += more
    return shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input", "absent.jsonl"], "absent.jsonl: no such file"),
        (["--input", "a.jsonl", "absent.txt"], "absent.txt: no such file"),
        (["--input", "a.jsonl", "--json-keys", "title"], 'a.jsonl:1: no key "title"'),
        (["--input", "a.jsonl", "--json-keys", "text", "text"], "a key is named twice"),
        (["--input", "a.jsonl", "--json-keys", "a/b"], "a key becomes part of a file name"),
        (["--input", "b.txt", "--json-keys", "a", "b"], "b.txt has no keys"),
        (["--input", "a.jsonl", "--workers", "0"], "--workers 0 must be at least 1"),
        (["--input", "empty.jsonl"], "empty.jsonl: no text found"),
        (["--input", "a.jsonl", "--output-prefix", "absent/p"], "absent does not exist"),
        (["--input", "a.jsonl", "--output-prefix", "/proc/p"], "/proc"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    (tmp_path / "b.txt").write_text("x")
    (tmp_path / "empty.jsonl").touch()
    before = sorted(tmp_path.iterdir())
    assert preprocess("--output-prefix", "p", *BYTES, *flags) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("megatron-ext: error: ")
    assert errors.count("\n") == 1
    assert message in errors
    assert sorted(tmp_path.iterdir()) == before
