"""Turns a command line into consistent arguments, or raises one `ArgumentsError`.

The result is an `argparse.Namespace` with upstream's names, because upstream's checkpoints store
such a namespace and read it back. It derives the same values as upstream's
`megatron/training/arguments.py`; upstream's assertions are errors here, with value, rule and
remedy.
"""

from __future__ import annotations

import difflib
import logging
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

import torch
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_ext.config.prepared_arguments import check, prepare
from megatron_ext.errors import ArgumentsError
from megatron_ext.patches.arguments import prepare_parser
from megatron_ext.patches.registry import REGISTRY
from megatron_ext.training.trainer_flags import add_flags

__all__ = ["Model", "parse"]

Model = Literal["gpt", "bert"]

logger = logging.getLogger(__name__)

_DEFAULT_TOKENIZER: dict[Model, str] = {
    "gpt": "GPT2BPETokenizer",
    "bert": "BertWordPieceLowerCase",
}
_REQUIRED = (
    "--num-layers",
    "--hidden-size",
    "--num-attention-heads",
    "--max-position-embeddings",
    "--seq-length",
    "--micro-batch-size",
    "--lr",
)
# Counts that must be at least 1.
_COUNTS = (
    *(flag for flag in _REQUIRED if flag != "--lr"),
    "--global-batch-size",
    "--train-iters",
    "--train-samples",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--ffn-hidden-size",
    "--kv-channels",
    "--num-query-groups",
    "--moe-router-topk",
    "--make-vocab-size-divisible-by",
    "--vocab-size",
    "--log-interval",
    "--save-interval",
    "--ddp-num-buckets",
    "--distributed-timeout-minutes",
)
# Counts that may be 0.
_COUNTS_OR_ZERO = ("--eval-interval", "--eval-iters", "--exit-interval", "--num-workers")
# Flags of which at most one may be given.
_EXCLUSIVE = (
    ("--fp16", "--bf16"),
    ("--multi-latent-attention", "--group-query-attention"),
    ("--train-iters", "--train-samples"),
    ("--mock-data", "--data-path"),
    (
        "--pipeline-model-parallel-layout",
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
    ),
)


class _Parser(ArgumentParser):
    """A parser that raises `ArgumentsError`, so every rank fails in the same way."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentsError(f"{message} (--help lists all flags of the embedded trainer)")


def parse(model: Model, argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Namespace:
    """Parse, complete and check a command line.

    Args:
        model: What is trained; decides the default tokenizer.
        argv: The flags, without the program's name.
        environ: Where RANK, WORLD_SIZE and LOCAL_RANK are read from (one process if unset).

    Returns:
        Upstream's arguments, complete: data-parallel size, layer split, dtypes and so on.

    Raises:
        ArgumentsError: A flag is unknown, unsupported, missing, or contradicts another.
        ScheduleError: The pipeline schedule cannot run with these sizes.
    """
    parser = _Parser(prog=f"pretrain_{model}.py", allow_abbrev=False)
    add_flags(parser, local_rank=int(environ.get("LOCAL_RANK", "0")))
    prepare_parser(parser)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse_unknown(parser, unknown)
    args.rank = int(environ.get("RANK", "0"))
    args.world_size = int(environ.get("WORLD_SIZE", "1"))
    args.tokenizer_type = args.tokenizer_type or _DEFAULT_TOKENIZER[model]
    _check_given(args)
    REGISTRY.raise_mismatches()
    prepare(args)
    _check_together(args)
    _complete(args)
    check(args)
    return args


def _refuse_unknown(parser: ArgumentParser, unknown: list[str]) -> NoReturn:
    flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    if not flags:
        raise ArgumentsError(f"unexpected words: {' '.join(unknown)}; put them after a flag")
    near = difflib.get_close_matches(flags[0], parser._option_string_actions, n=1, cutoff=0.8)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ArgumentsError(
        f"{', '.join(flags)}: not among the flags of the embedded trainer.{hint} A flag of "
        "Megatron-LM that is missing here needs Megatron-LM's own script: run `megatron-ext "
        "upstream fetch` once, then the same command line."
    )


def _require(condition: object, message: str) -> None:
    if not condition:
        raise ArgumentsError(message)


def _divides(value: int, what: str, by: int, by_what: str, remedy: str = "change one") -> None:
    _require(value % by == 0, f"{what} = {value} is not a multiple of {by_what} = {by}: {remedy}")


def _given(args: Namespace, flag: str) -> Any:
    return getattr(args, flag[2:].replace("-", "_"))


def _check_given(args: Namespace) -> None:
    for flag in _REQUIRED:
        _require(_given(args, flag) is not None, f"{flag} is missing: give it a value")
    for least, flags in ((1, _COUNTS), (0, _COUNTS_OR_ZERO)):
        for flag in flags:
            value = _given(args, flag)
            _require(value is None or value >= least, f"{flag} {value} is below {least}: give more")


def _check_together(args: Namespace) -> None:
    """Check flags that need or exclude each other."""
    for group in _EXCLUSIVE:
        given = [flag for flag in group if _given(args, flag)]
        _require(len(given) <= 1, f"{' and '.join(given)} exclude each other: give one of them")
    for holds, message in _rules(args):
        _require(holds, message)


def _rules(args: Namespace) -> Iterator[tuple[object, str]]:
    """List conditions, each with the error to raise if it does not hold."""
    yield args.mock_data or args.data_path, "no data: give --data-path or --mock-data"
    yield args.train_iters or args.train_samples, "give --train-iters or --train-samples"
    unit, other = ("samples", "iters") if args.train_samples else ("iters", "samples")
    for flag in ("--lr-decay-", "--lr-warmup-", "--lr-wsd-decay-"):
        yield (
            not _given(args, flag + other),
            f"{flag}{other} contradicts --train-{unit}: use {flag}{unit}",
        )
    yield (
        args.lr_warmup_fraction is None or not _given(args, f"--lr-warmup-{unit}"),
        f"--lr-warmup-fraction and --lr-warmup-{unit} exclude each other: give one of them",
    )
    yield args.min_lr <= args.lr, f"--min-lr {args.min_lr} is above --lr {args.lr}"
    yield not args.save or args.save_interval, "--save needs --save-interval"
    longest = args.max_position_embeddings
    yield (
        longest >= args.seq_length,
        f"--max-position-embeddings {longest} is below --seq-length {args.seq_length}",
    )
    yield (
        not args.mtp_num_layers
        or args.use_rotary_position_embeddings
        or args.position_embedding_type != "learned_absolute",
        "--mtp-num-layers needs --position-embedding-type rope or none",
    )
    yield (
        not args.overlap_param_gather
        or (args.use_distributed_optimizer and args.overlap_grad_reduce),
        "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce",
    )
    ep, experts, topk = args.expert_model_parallel_size, args.num_experts, args.moe_router_topk
    yield ep == 1 or experts, f"--expert-model-parallel-size {ep} needs --num-experts"
    yield (
        not experts or topk <= experts,
        f"--moe-router-topk {topk} is above --num-experts {experts}",
    )
    yield (
        not experts or args.swiglu or not (args.bias_gelu_fusion and args.add_bias_linear),
        "--num-experts cannot fuse bias and GELU: add --no-bias-gelu-fusion, or use --swiglu",
    )


def _complete(args: Namespace) -> None:
    """Derive missing values, and check divisibility, in upstream's order."""
    _parallel_sizes(args)
    _pipeline_split(args)
    _precision(args)
    _architecture(args)
    if args.train_samples:
        args.train_iters = args.train_samples // args.global_batch_size
    if args.data_path and args.split is None:
        args.split = "969, 30, 1"  # upstream's, for scripts that rely on it
    args.consumed_train_samples = args.skipped_train_samples = args.consumed_valid_samples = 0
    args.iteration = 0
    args.use_dist_ckpt = True  # upstream reads it from the arguments that a checkpoint holds


def _parallel_sizes(args: Namespace) -> None:
    """Divide processes among copies of the model, and the batch among the copies."""
    tp, pp, world = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.world_size,
    )
    _require(
        world and world % (tp * pp) == 0,
        f"{world} process(es), but one copy of the model needs tensor {tp} x pipeline {pp} = "
        f"{tp * pp}: start a multiple (torchrun --nproc-per-node {tp * pp}) or lower a size",
    )
    args.data_parallel_size = world // (tp * pp)
    args.sequence_parallel &= tp > 1
    etp = args.expert_tensor_parallel_size = args.expert_tensor_parallel_size or tp
    ep = args.expert_model_parallel_size
    if ep > 1:
        _divides(args.num_experts, "--num-experts", ep, "--expert-model-parallel-size")
        factors = f"expert {ep} x expert-tensor {etp} x pipeline {pp}"
        _divides(world, "number of processes", ep * etp * pp, factors, "start a multiple")
    step = args.micro_batch_size * args.data_parallel_size
    args.global_batch_size = args.global_batch_size or step
    factors = f"micro-batch {args.micro_batch_size} x data-parallel {args.data_parallel_size}"
    _divides(args.global_batch_size, "--global-batch-size", step, factors, "give a multiple")


def _pipeline_split(args: Namespace) -> None:
    """Set `virtual_pipeline_model_parallel_size` and what depends on it."""
    pp, layers = args.pipeline_model_parallel_size, args.num_layers
    layout, size = args.pipeline_model_parallel_layout, "--pipeline-model-parallel-size"
    per_chunk = args.num_layers_per_virtual_pipeline_stage
    chunks = args.num_virtual_stages_per_pipeline_rank
    uneven = args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers
    if layout is not None:
        try:
            stages = PipelineParallelLayerLayout.get_num_stages_from_str(layout)
        except AssertionError as error:
            raise ArgumentsError(f"--pipeline-model-parallel-layout {layout}: {error}") from error
        _divides(stages, "stages of --pipeline-model-parallel-layout", pp, size)
        chunks = stages // pp
    elif not uneven:
        remedy = "change --num-layers, or split by --pipeline-model-parallel-layout"
        _divides(layers, "number of layers", pp, size, remedy)
    if per_chunk is not None:
        flag = "--num-layers-per-virtual-pipeline-stage"
        remedy = "--num-virtual-stages-per-pipeline-rank"
        _require(not uneven, f"uneven first or last stages need {remedy} instead of {flag}")
        _divides(layers // pp, "layers per pipeline rank", per_chunk, flag)
        chunks = layers // pp // per_chunk
    several = args.align_param_gather = bool(chunks and chunks > 1)
    args.virtual_pipeline_model_parallel_size = chunks if several else None
    args.overlap_p2p_comm &= several  # with one chunk there is no other to compute meanwhile
    least = 2 if args.overlap_p2p_comm else 3
    _require(
        pp >= least or not several,
        f"virtual pipeline stages need --pipeline-model-parallel-size >= {least} (it is {pp})",
    )


def _precision(args: Namespace) -> None:
    args.params_dtype = torch.float32
    if args.fp16:
        args.params_dtype = torch.float16
        if not args.loss_scale:  # a dynamic loss scale finds its value by overflowing
            args.check_for_nan_in_loss_and_grad = False
    if args.bf16:
        args.params_dtype = torch.bfloat16
        args.accumulate_allreduce_grads_in_fp32 = not args.grad_reduce_in_bf16


def _architecture(args: Namespace) -> None:
    if args.ffn_hidden_size is None:
        # Three matrices instead of two with SwiGLU: keep the parameter count, in multiples of 64.
        args.ffn_hidden_size = 4 * args.hidden_size
        if args.swiglu:
            args.ffn_hidden_size = int((4 * args.hidden_size * 2 / 3) / 64) * 64
    if args.kv_channels is None:
        remedy = "change one, or give --kv-channels"
        heads = args.num_attention_heads
        _divides(args.hidden_size, "--hidden-size", heads, "--num-attention-heads", remedy)
        args.kv_channels = args.hidden_size // heads
    parts = args.tensor_model_parallel_size if args.sequence_parallel else 1
    _divides(args.seq_length, "--seq-length", parts, "its sequence-parallel parts")
    if args.recompute_activations:
        args.recompute_granularity = "selective"
    if args.use_rotary_position_embeddings:
        args.position_embedding_type = "rope"
    args.apply_rope_fusion &= args.position_embedding_type == "rope"
    args.add_qkv_bias |= args.add_bias_linear
    args.bias_gelu_fusion &= args.add_bias_linear
    args.num_experts = args.num_experts or None
    if args.num_experts:
        args.moe_ffn_hidden_size = args.moe_ffn_hidden_size or args.ffn_hidden_size
    for dest in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        value = getattr(args, dest)
        if isinstance(value, list) and len(value) == 1:
            setattr(args, dest, value[0])
