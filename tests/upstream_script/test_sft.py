"""Packed conversations (`--sft`): the unmodified script trains with the losses of one stage."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_ext.upstream.releases import core_version
from tests.upstream_script.runs import COMMON, UNTIED, save_start, train

pytestmark = [
    pytest.mark.tree,
    pytest.mark.usefixtures("megatron_lm_path"),
    pytest.mark.skipif(
        core_version().startswith("0.16"),
        reason="0.16 gives middle stages no packed batches",
    ),
    pytest.mark.skipif(
        find_spec("datasets") is None or find_spec("transformers") is None,
        reason="upstream's --sft needs datasets and transformers",
    ),
]

WORDS = "zero one two three four five six seven eight nine ten".split()
PACKED = COMMON.replace("--micro-batch-size 2", "--micro-batch-size 1") + (
    "--sft --tokenizer-type SFTTokenizer --sft-tokenizer-prompt-format identity "
    "--position-embedding-type rope --transformer-impl local --split 100,0,0 --eval-iters 0 "
    "--make-vocab-size-divisible-by 16 --no-create-attention-mask-in-dataloader "
    "--calculate-per-token-loss --num-layers 8 --clip-grad 0 --train-iters 3 " + UNTIED
)
EVERY = [
    *((2, f"--pipeline-model-parallel-size 2 --pipeline-schedule {name} ")
      for name in ("1f1b", "zb-v", "interleaved")),
    (2, "--pipeline-model-parallel-size 2 --use-dpp "),
    (4, "--pipeline-model-parallel-size 4 --pipeline-schedule zb-h1 "),
]  # fmt: skip


PP2, PP4 = (f"--pipeline-model-parallel-size {pp} " for pp in (2, 4))
BALANCED = [
    (2, PP2 + "--pipeline-schedule 1f1b --pipeline-balance order "),
    (4, PP4 + "--pipeline-schedule bitpipe --pipeline-balance order "),
    (4, PP4 + "--pipeline-schedule dualpipe --pipeline-balance order "),
    (4, PP2 + "--pipeline-schedule zb-v --pipeline-balance pack "),
    (4, PP4 + "--pipeline-schedule bitpipe --pipeline-balance pack "),
    (4, PP2 + "--use-dpp --pipeline-balance pack "),
]


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    folder = tmp_path_factory.mktemp("sft")
    flags = f"{PACKED}--data-path {_conversations(folder)} --tokenizer-model {_tokenizer(folder)} "
    flags += f"--data-cache-path {folder / 'cache'} "
    start = save_start(folder / "start", flags)
    return start, train(1, start)


def _conversations(folder: Path) -> Path:
    """Write samples of one to four conversations, which upstream packs."""
    draw = random.Random(1)
    lines = []
    for _ in range(64):
        messages = []
        for _ in range(draw.randint(1, 4)):
            for role in ("system", "user", "assistant"):
                said = draw.choices(WORDS, k=draw.randint(1, 5))
                messages.append({"role": role, "content": " ".join(said) + " "})
        lines.append(json.dumps({"messages": messages}))
    path = folder / "conversations.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def _tokenizer(folder: Path) -> Path:
    """Save a tokenizer of a few words in the format that upstream loads."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {word: number for number, word in enumerate(["<unk>", "<eos>", *WORDS])}
    words = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = folder / "tokenizer"
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="<eos>"
    ).save_pretrained(path)
    return path


@pytest.mark.parametrize(("ranks", "schedule"), EVERY)
def test_losses_of_one_stage(
    sft: tuple[str, list[float]], ranks: int, schedule: str
) -> None:
    start, alone = sft
    assert train(ranks, start + schedule) == alone


@pytest.mark.parametrize(("ranks", "schedule"), BALANCED)
def test_losses_of_one_stage_in_another_order(
    sft: tuple[str, list[float]], ranks: int, schedule: str
) -> None:
    start, alone = sft
    assert train(ranks, start + schedule) == pytest.approx(alone, rel=1e-5)


def test_a_job_resumes_as_if_it_had_not_stopped(
    sft: tuple[str, list[float]], tmp_path: Path
) -> None:
    flags = f"{sft[0]}{PP2}--pipeline-schedule 1f1b --pipeline-balance pack "
    saving = f"--save {tmp_path} --save-interval 2 --exit-interval 2"
    assert len(train(4, f"{flags}{saving}")) == 2
    resumed = train(4, f"{flags.replace('--finetune ', '')}--load {tmp_path}")
    assert resumed == train(4, flags)[2:]
