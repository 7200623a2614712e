"""Datasets are checked before they are read, and dealt to replicas in order."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks

from .helpers import MOCK, gpt_dataset, write_dataset


def checked(prefixes: list[str]) -> list[Any]:
    from megatron_ext.errors import DataError
    from megatron_ext.training.data import check_indexed_dataset

    found: list[Any] = []
    ignored: list[Any] = []
    sys.unraisablehook = ignored.append  # such as errors in __del__, which print a traceback
    for prefix in prefixes:
        try:
            found.append(check_indexed_dataset(prefix))
        except DataError as error:  # noqa: PERF203
            found.append(str(error))
    assert ignored == []
    return found


def test_a_whole_dataset_is_counted(tmp_path: Path) -> None:
    prefix = write_dataset(tmp_path / "x", [[[1, 2], [3]], [[4]]])
    assert run_ranks(1, checked, [prefix]) == [[(3, 2)]]


def _changed(index: bytes, at: int) -> bytes:
    return index[:at] + bytes([index[at] ^ 0x40]) + index[at + 1 :]


def test_a_damaged_dataset_is_named(tmp_path: Path) -> None:
    whole = Path(gpt_dataset(tmp_path / "whole"))
    index = whole.with_suffix(".idx").read_bytes()
    tokens = whole.with_suffix(".bin").read_bytes()
    damaged = {
        "no header": (b"", tokens, "bad header"),
        "another file": (b"PK\x03\x04" + bytes(100), tokens, "bad header"),
        "version": (index[:9] + b"\x02" + index[10:], tokens, "bad version"),
        "type": (index[:17] + b"\x63" + index[18:], tokens, "99 is not a valid"),
        "cut index": (index[:-3], tokens, "a damaged index"),
        "counts": (index[:25] + b"\x7f" + index[26:], tokens, "a damaged index"),
        "lengths": (_changed(index, 34 + 4 * 50), tokens, "sequence 51 "),
        "pointers": (_changed(index, 34 + 4 * 100 + 8 * 70), tokens, "sequence 70 "),
        "documents": (_changed(index, len(index) - 8 * 20), tokens, "document 81 "),
        "cut tokens": (index, tokens[:-2], "its index tells"),
        "empty": (index[:18] + bytes(8) + b"\x01" + bytes(15), b"", "no documents"),
    }
    prefixes = [str(tmp_path / "absent")]
    for name, (head, body, _) in damaged.items():
        prefix = tmp_path / name.replace(" ", "_")
        prefix.with_suffix(".idx").write_bytes(head)
        prefix.with_suffix(".bin").write_bytes(body)
        prefixes.append(str(prefix))
    absent, *messages = run_ranks(1, checked, prefixes)[0]
    assert "absent.idx: there is no such file" in absent
    for prefix, message, (_, _, expected) in zip(
        prefixes[1:], messages, damaged.values(), strict=True
    ):
        assert prefix in message
        assert expected in message


def dealt(total: int, consumed: int, replicas: int) -> list[list[list[int]]]:
    from megatron_ext.training.data import _Sampler

    return [list(_Sampler(total, consumed, 2, replica, replicas)) for replica in range(replicas)]


def test_replicas_take_turns() -> None:
    (found,) = run_ranks(1, dealt, 15, 4, 2)
    assert found == [[[4, 5], [8, 9]], [[6, 7], [10, 11]]]


def padded_vocabularies(flags: list[str]) -> list[int]:
    from megatron_ext.training.data import build_tokenizer
    from megatron_ext.training.trainer_arguments import parse

    sizes = []
    for line in flags:
        args = parse("gpt", line.split(), {"WORLD_SIZE": "2"})
        build_tokenizer(args)
        sizes.append(args.padded_vocab_size)
    return sizes


def test_vocabularies_are_padded() -> None:
    flags = [
        MOCK,  # 100 ids and an end of document
        MOCK + "--tensor-model-parallel-size 2",
        MOCK + "--tokenizer-type ByteLevelTokenizer --make-vocab-size-divisible-by 100",
        MOCK + "--padded-vocab-size 104",
    ]
    assert run_ranks(1, padded_vocabularies, flags) == [[128, 256, 600, 104]]
