"""Flags of a tiny model, its log lines, and data for it."""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Sequence
from pathlib import Path

from tests.ranks import RankRun, _run_script, require_training, start_ranks

SHAPE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --log-interval 1 --num-workers 0 "
    "--lr 1e-3 --min-lr 1e-4 "
)
LENGTH = "--train-iters 3 --lr-warmup-iters 1 --eval-iters 1 --eval-interval 2 "
NULL = "--tokenizer-type NullTokenizer --vocab-size 100 --seq-length 16 "
GPT = SHAPE + LENGTH + NULL
MOCK = GPT + "--mock-data "
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0 "
LLAMA = (
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights "
)
MOE = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 "
MLA = (
    "--multi-latent-attention --position-embedding-type rope --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --q-lora-rank 16 "
    "--kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 --mtp-num-layers 1 "
)


def train(num_ranks: int, flags: str, *, script: str = "pretrain_gpt.py") -> RankRun:
    """Run a training script."""
    require_training(script)
    return start_ranks(num_ranks, run_script_reproducibly, script, flags.split())


def run_script_reproducibly(script: str, argv: Sequence[str]) -> None:
    """Run a script with the order of a HuggingFace vocabulary fixed."""
    fix_vocabulary_order()
    _run_script(script, argv)


def fix_vocabulary_order() -> None:
    """Sort HuggingFace vocabularies in this process.

    BERT replaces masked tokens with entries of the vocabulary, whose order HuggingFace randomizes
    in each process, so even two upstream runs differ.
    """
    from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import (
        HuggingFaceTokenizer,
    )

    original = HuggingFaceTokenizer.inv_vocab.fget
    HuggingFaceTokenizer.inv_vocab = property(
        lambda self: dict(sorted(original(self).items()))
    )


def report(run: RankRun) -> list[str]:
    """Return the log lines about training and validation, without times."""
    assert not any(run.exit_codes), run.describe()
    lines = [
        re.sub(r"^ \[.*?\]| elapsed time per iteration \(ms\): [\d.]+ \|", "", line)
        for log in run.logs
        for line in log.splitlines()
        if re.search(r"iteration +\d+/|validation loss at", line)
    ]
    assert lines, run.describe()
    return lines


def errors(run: RankRun) -> list[str]:
    """Return the error lines of a run that must have failed on all ranks without a traceback.

    Any rank may report an error common to all, and a late rank repeats the line.
    """
    text = "\n".join(run.logs)
    assert run.exit_codes == [2] * len(run.exit_codes), run.describe()
    assert "Traceback" not in text, text
    return [line for line in text.splitlines() if "megatron_ext: error:" in line]


def write_dataset(prefix: Path, documents: Sequence[Sequence[Sequence[int]]]) -> str:
    """Write documents of sentences of token ids in Megatron's format; return the prefix."""
    sentences = [sentence for document in documents for sentence in document]
    bounds = [0]
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    offsets = [0]
    for sentence in sentences[:-1]:
        offsets.append(offsets[-1] + 2 * len(sentence))
    tokens = [token for sentence in sentences for token in sentence]
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
    prefix.with_suffix(".idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(sentences), len(bounds))
        + struct.pack(f"<{len(sentences)}i", *map(len, sentences))
        + struct.pack(f"<{len(offsets)}q", *offsets)
        + struct.pack(f"<{len(bounds)}q", *bounds)
    )
    return str(prefix)


def gpt_dataset(prefix: Path, *, documents: int = 100, seed: int = 0) -> str:
    """Write documents of one sequence of random ids below 99, ended by 99."""
    draw = random.Random(seed)
    lengths = [draw.randrange(5, 50) for _ in range(documents)]
    return write_dataset(
        prefix, [[[*draw.choices(range(99), k=n), 99]] for n in lengths]
    )


def bert_flags(directory: Path) -> str:
    """Write a vocabulary and documents of sentences; return the flags of a tiny BERT on them."""
    draw = random.Random(0)
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *(f"w{i}" for i in range(95)),
    ]
    tokenizer = directory / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "vocab.txt").write_text("\n".join(words) + "\n")
    (tokenizer / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (tokenizer / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True})
    )
    documents = [
        [
            [draw.randrange(5, 100) for _ in range(draw.randrange(3, 9))]
            for _ in range(3)
        ]
        for _ in range(200)
    ]
    data = write_dataset(directory / "bert", documents)
    return (
        f"{SHAPE}{LENGTH}--seq-length 24 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "
        f"{tokenizer} --data-path {data} --split 90,5,5 --data-cache-path {directory}/cache "
        "--spec local "
    )
