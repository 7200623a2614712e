"""Command lines as people mistype them."""

from __future__ import annotations

from random import Random

LINE = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 3 "
    "--eval-interval 10 --eval-iters 0 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 127 --split 98,1,1 --untie-embeddings-and-output-weights --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --weight-decay 0.1 --seed 7 "
    "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 1 --context-parallel-size 1 "
    "--distributed-timeout-minutes 5 --log-interval 1 --pipeline-schedule zb-v "
    "--pipeline-transport shm --hang-timeout 60 --trace --trace-interval 10 "
)
"""A valid training command: Megatron's flags and ours, with values of every kind."""

MORE = (
    "--decoder-first-pipeline-num-layers 2", "--num-virtual-stages-per-pipeline-rank 2",
    "--rampup-batch-size 8 8 64", "--moe-layer-freq 2", "--recompute-granularity full",
    "--attention-backend flash", "--num-experts 4", "--expert-model-parallel-size 1",
    "--pipeline-layout auto", "--pipeline-costs 1,1,1", "--dpp-policy hint", "--use-dpp",
    "--pipeline-slices 2", "--window-size 4,0", "--exit-interval 3",
    "--pipeline-model-parallel-layout Et|tt|tt|ttt|L", "--cuda-graph-impl local",
)  # fmt: skip
"""Flags that a mutation may add at the front."""


def flags_of(line: str) -> list[list[str]]:
    """Return the flags of a line, each with its values."""
    flags: list[list[str]] = []
    for word in line.split():
        if word.startswith("--"):
            flags.append([])
        flags[-1].append(word)
    return flags


def misspelled(word: str, random: Random) -> str:
    """Return a word with one typing mistake after its first three letters."""
    place = random.randrange(3, len(word)) if len(word) > 3 else 0
    mistakes = [
        word[:place] + word[place + 1 :],
        word[:place] + word[place] + word[place:],
        word[:place] + random.choice("xkz") + word[place + 1 :],
    ]
    return random.choice(mistakes)


def mutated(random: Random) -> list[str]:
    """Return the words of a training with one mistake, or occasionally none."""
    flags = flags_of(LINE)
    if random.random() < 0.4:
        flags += flags_of(random.choice(MORE))
        place = len(flags) - 1
    else:
        place = random.randrange(len(flags))
    name, *values = flags[place]
    kind = random.randrange(7)
    if kind == 0:
        name = misspelled(name, random)
    elif kind == 1 and values:
        values[-1] = misspelled(values[-1], random)
    elif kind == 2 and values:
        values[-1] += random.choice(["x", "k", ".5", "m", ",", "e"])
    elif kind == 3 and values:
        values = []
    elif kind == 4:
        values.append(random.choice(["8", "x"]))
    elif kind == 5 and values:
        values[0] = random.choice(["", "x", "-1", "1.5", "nan", "None"])
    elif kind == 6:
        del flags[place]
        return [word for flag in flags for word in flag]
    flags[place] = [name, *values]
    return [word for flag in flags for word in flag]
