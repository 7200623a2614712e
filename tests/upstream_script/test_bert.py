"""The unmodified pretrain_bert.py, on tiny real data: upstream has no mock data for it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.upstream_script.runs import COMMON, save_start, train

pytestmark = [pytest.mark.tree, pytest.mark.usefixtures("megatron_lm_path")]

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_NUM_WORDS = 59


def write_data(directory: str) -> None:
    """Write a vocabulary and an indexed dataset: one item for each sentence, documents of some."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    base = Path(directory)
    words = [*_SPECIAL, *(f"w{i}" for i in range(_NUM_WORDS))]
    (base / "vocab.txt").write_text("\n".join(words) + "\n")
    draw = random.Random(0)
    builder = IndexedDatasetBuilder(str(base / "text_sentence.bin"), dtype=np.uint16)
    for _ in range(200):
        for _ in range(draw.randint(2, 6)):
            length = draw.randint(4, 10)
            tokens = [draw.randrange(len(_SPECIAL), len(words)) for _ in range(length)]
            builder.add_item(torch.tensor(tokens))
        builder.end_document()
    builder.finalize(str(base / "text_sentence.idx"))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("bert")
    run_ranks(1, write_data, str(directory))
    flags = COMMON + (
        f"--split 90,5,5 --data-path {directory}/text_sentence --vocab-file {directory}/vocab.txt "
        "--make-vocab-size-divisible-by 64 --eval-iters 1 --legacy-tokenizer "
    )
    return save_start(directory / "start", flags, script="pretrain_bert.py")


@pytest.mark.parametrize("kind", ["pipeline", "tensor"])
def test_two_ranks_equal_one(start: str, kind: str) -> None:
    two = train(2, f"{start}--{kind}-model-parallel-size 2", script="pretrain_bert.py")
    assert two == pytest.approx(train(1, start, script="pretrain_bert.py"), rel=1e-5)
