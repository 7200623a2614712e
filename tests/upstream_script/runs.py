"""Runs upstream's unmodified scripts on the CPU, at the size of a test, and reads their losses.

Initial weights depend on the pipeline rank that draws them (upstream seeds each stage), so runs
that must agree start from one checkpoint saved by a single process, because `torch_dist` loads
under any parallelism.
"""

from __future__ import annotations

from pathlib import Path

from tests.ranks import RankRun, RanksFailed, losses, start_script

TIMEOUT_S = 240

COMMON = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 5 "
    "--lr 1e-3 --min-lr 1e-4 --hidden-dropout 0 --attention-dropout 0 --log-interval 1 "
    "--eval-interval 10 --num-workers 0 "
)
GPT = COMMON + (
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --split 98,1,1 --eval-iters 0 "
    "--make-vocab-size-divisible-by 16 --no-create-attention-mask-in-dataloader "
)
UNTIED = "--untie-embeddings-and-output-weights "
MIXTRAL = (
    "--swiglu --disable-bias-linear --num-experts 4 --moe-router-topk 2 "
    "--moe-aux-loss-coeff 0.01 "
)
DEEPSEEK = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 8 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 8 --num-experts 4 --moe-router-topk 2 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32 --moe-ffn-hidden-size 32 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 "
    "--moe-shared-expert-intermediate-size 32 --moe-layer-freq ([0]*1+[1]*3) "
    "--moe-token-dispatcher-type alltoall --mtp-num-layers 1 --normalization RMSNorm --swiglu "
    "--disable-bias-linear --position-embedding-type rope " + UNTIED
)


def run(num_ranks: int, flags: str, *, script: str = "pretrain_gpt.py") -> RankRun:
    """Run a script and return how it ended."""
    return start_script(num_ranks, script, flags.split(), timeout_s=TIMEOUT_S)


def train(
    num_ranks: int, flags: str, *, script: str = "pretrain_gpt.py"
) -> list[float]:
    """Train and return the loss of each step."""
    ended = run(num_ranks, flags, script=script)
    if any(ended.exit_codes):
        raise RanksFailed(ended.describe())
    return step_losses(losses(ended.logs))


def step_losses(logged: list[float]) -> list[float]:
    """Undo upstream's first average.

    The sums behind a log line are not reset after a run's first step, so the second line is the
    mean of both steps.
    """
    if len(logged) < 2:
        return logged
    return [logged[0], 2 * logged[1] - logged[0], *logged[2:]]


def save_start(path: Path, flags: str, *, script: str = "pretrain_gpt.py") -> str:
    """Save a checkpoint with one process; return the flags that start any run from it."""
    saving = (
        f"--train-iters 1 --save {path} --save-interval 1 --no-save-optim --no-save-rng"
    )
    train(1, flags + saving, script=script)
    return f"{flags} --load {path} --finetune "
