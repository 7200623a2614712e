"""Measures the memory of ranks in real trainings, next to the forecasts of planner and tables."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron_ext import devices
from megatron_ext.config.active import required
from megatron_ext.config.incompatible import RULES
from megatron_ext.features.slices.slice_steps import kept_state
from megatron_ext.observer import Observer
from megatron_ext.planning.hardware import DEVICES
from megatron_ext.planning.layout_search import search
from megatron_ext.planning.model_flags import sizes_of_flags
from megatron_ext.planning.question import Question
from megatron_ext.planning.techniques import techniques_of_flags
from megatron_ext.runtime.runtime import in_force
from megatron_ext.schedules.generators.catalog import generate, get, registered
from megatron_ext.schedules.table.memory import measure as memory_of
from megatron_ext.tracing.session import kept_bytes
from tests.ranks import run_ranks, train_here

if TYPE_CHECKING:
    from megatron_ext.runtime.compute import StageCompute
    from megatron_ext.schedules.table.actions import Action

_SEQUENCE, _MICRO_BATCH, _NUM_MICROBATCHES = 128, 2, 8
_TRAINING = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --max-position-embeddings 128 "
    f"--micro-batch-size {_MICRO_BATCH} --num-workers 0 --lr 1e-3 --train-iters 1 "
    "--eval-iters 0 --eval-interval 100 --tokenizer-type NullTokenizer --vocab-size 1000 "
    f"--padded-vocab-size 1024 --make-vocab-size-divisible-by 512 --seq-length {_SEQUENCE} "
    "--mock-data --hidden-dropout 0 --attention-dropout 0 --bf16 --transformer-impl local "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm "
)
_LLAMA = (
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights "
)
_MODELS = {
    "dense": "--untie-embeddings-and-output-weights ",
    "tied": "--position-embedding-type rope ",
    "grouped queries": _LLAMA + "--group-query-attention --num-query-groups 2 ",
    "latent attention": _LLAMA
    + "--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 96 --qk-head-dim 48 "
    "--qk-pos-emb-head-dim 16 --v-head-dim 48 --qk-layernorm ",
    # Every expert gets every token, so the load is balanced.
    "experts": _LLAMA + "--num-experts 2 --moe-router-topk 2 --moe-ffn-hidden-size 320 "
    "--expert-tensor-parallel-size 1 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none ",
    "multi-token prediction": _LLAMA + "--mtp-num-layers 1 ",
}
_PARALLELISM = {
    "PP 4": (4, {"tp": 1, "pp": 4, "ep": 1}),
    "TP 2, SP, PP 2": (4, {"tp": 2, "pp": 2, "ep": 1}),
    "DP 2, PP 2": (4, {"tp": 1, "pp": 2, "ep": 1}),
    "EP 2, PP 2": (4, {"tp": 1, "pp": 2, "ep": 2}),
}


_SCHEDULES = [name for name in registered() if name != "gpipe"]
"""The schedules that the planner uses."""


_SLICED = (
    f"{_TRAINING}--num-attention-heads 1 --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --recompute-granularity selective --micro-batch-size 1 "
    "--no-create-attention-mask-in-dataloader --pipeline-transport shm "
)
"""A model that keeps little more than its table says, because attention is recomputed."""
HIDDEN = 64
"""Width of that model, which has one layer per rank."""


class Case(NamedTuple):
    """A model, its ranks and its schedule."""

    model: str
    parallelism: str
    schedule: str


class Held(NamedTuple):
    """Bytes on a rank, forecast or measured."""

    static: float
    """Weights, gradient buffers and optimizer states."""
    kept: float
    """Peak of what autograd and waiting weight gradients keep."""


class Rank(NamedTuple):
    """Memory of a rank in a training, and its place."""

    held: Held
    keys_bytes: int
    """Peak of keys, values and their gradients that layers keep between slices."""
    planned: float
    """Activations according to the rank's table, in micro-batches."""
    planned_keys: float
    """Keys and values according to the rank's table, in micro-batches."""
    layers: list[int]
    """Layers in each chunk."""
    number: int
    """Rank in the pipeline."""


def cases() -> Iterator[Case]:
    """Yield every model under every schedule, alternating the kinds of parallelism."""
    for number, model in enumerate(_MODELS):
        parallelisms = [
            "PP 4",
            "TP 2, SP, PP 2",
            "EP 2, PP 2" if model == "experts" else "DP 2, PP 2",
        ]
        if model == "latent attention":
            parallelisms.remove(
                "TP 2, SP, PP 2"
            )  # divides the latents without Transformer Engine
        for turn, schedule in enumerate(_SCHEDULES):
            chosen = (
                "PP 4"
                if get(schedule).twins == 2
                else parallelisms[(number + turn) % len(parallelisms)]
            )
            yield Case(model, chosen, schedule)


def compared(case: Case) -> list[tuple[Held, Held]]:
    """Train one step; return the forecast and the measurement for each rank of a pipeline."""
    ranks, sizes = _PARALLELISM[case.parallelism]
    generator, pp = get(case.schedule), sizes["pp"]
    batch = _MICRO_BATCH * _NUM_MICROBATCHES * ranks // (sizes["tp"] * pp)
    flags = (
        f"{_TRAINING}{_MODELS[case.model]}--global-batch-size {batch} --use-distributed-optimizer "
        f"--tensor-model-parallel-size {sizes['tp']} --pipeline-model-parallel-size {pp} "
        f"--expert-model-parallel-size {sizes['ep']} "
        f"{'--sequence-parallel ' if sizes['tp'] > 1 else ''}"
        f"{(generator.flags or f'--pipeline-schedule {case.schedule}').format(chunks=2)}"
    ).split()
    by_rank = {
        rank.number: rank for rank in run_ranks(ranks, measure, flags, timeout_s=300)
    }
    chunks = len(by_rank[0].layers)
    placement = generate(
        case.schedule, pp, _NUM_MICROBATCHES, chunks if generator.free_chunks else None
    ).placement
    layout = [
        by_rank[placement.rank_of[stage]].layers[placement.chunk_of(stage)]
        for stage in range(placement.num_stages)
    ]
    fixed = {**sizes, "cp": 1, "micro_batch": _MICRO_BATCH, "recompute": frozenset()}
    job = Question(
        model=sizes_of_flags(flags, case.model),
        device=DEVICES["h200"],
        num_devices=ranks,
        global_batch=batch,
        sequence=_SEQUENCE,
        pair_rules=RULES["pairs"],
        techniques=techniques_of_flags(flags),
        fixed={**fixed, "schedule": case.schedule, "vp": chunks, "layout": layout},
    )
    plan = search(job).plans[0]
    by_formula = [
        Held(static_gib * 2**30, kept_gib * 2**30)
        for static_gib, kept_gib in zip(plan.static_gib, plan.kept_gib, strict=True)
    ]
    return [(held, by_rank[rank].held) for rank, held in enumerate(by_formula)]


def sliced(
    schedule: str,
    pp: int,
    num_microbatches: int,
    slices: int,
    length: int,
    flags_besides: str = "",
) -> list[Rank]:
    """Train one step of a GPT with one layer on each of `pp` ranks.

    Args:
        schedule: A registered schedule with one stage on each rank.
        pp: Ranks of the pipeline.
        num_microbatches: Micro-batches, of one sample each.
        slices: Slices of each micro-batch.
        length: Tokens of a sample.
        more: Further flags.
    """
    flags = (
        f"{_SLICED}--num-layers {pp} --pipeline-model-parallel-size {pp} --hidden-size {HIDDEN} "
        f"--seq-length {length} --max-position-embeddings {length} --pipeline-slices {slices} "
        f"--global-batch-size {num_microbatches} --pipeline-schedule {schedule} {flags_besides}"
    )
    return run_ranks(pp, measure, flags.split(), timeout_s=600)


def measure(argv: list[str]) -> Rank:
    """Train as one rank; return its memory."""
    devices.current()  # must come before Megatron is imported
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model
    from megatron.training import training

    set_up, captured = training.setup_model_and_optimizer, {}

    @functools.wraps(set_up)
    def counting(*args: Any, **kwargs: Any) -> Any:
        set_up_model = set_up(*args, **kwargs)
        captured["set_up"], captured["counter"] = (
            set_up_model,
            Counting(torch.nn.ModuleList(set_up_model[0])),
        )
        required().observers.append(captured["counter"])
        return set_up_model

    training.setup_model_and_optimizer = (
        counting  # never restored: this process is a rank and ends
    )
    train_here("gpt", argv)
    counter, (chunks, optimizer, _) = captured["counter"], captured["set_up"]
    tensors = [weight for chunk in chunks for weight in chunk.parameters()]
    for chunk in chunks:
        tensors += [
            part.grad_data for part in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        states = part.optimizer.state
        for group in part.optimizer.param_groups:
            for weight in group["params"]:
                tensors += [weight, *filter(torch.is_tensor, states[weight].values())]
    number = parallel_state.get_pipeline_model_parallel_rank()
    planned = memory_of(counter.compute.table.schedule)
    return Rank(
        Held(_storage_bytes(tensors), counter.saved),
        counter.kept,
        planned.activations[number],
        planned.keys_and_values[number] if planned.keys_and_values else 0.0,
        [len(unwrap_model(chunk).decoder.layers) for chunk in chunks],
        number,
    )


class Counting(Observer):
    """Counts, after each action, the memory that the rank keeps."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.saved, self.kept = model, 0, 0
        self.saved_by_action: dict[Action, int] = {}
        self.compute: Any = None

    def begin_step(self, compute: StageCompute) -> None:
        self.compute = compute

    def end_action(self, position: int, action: Action) -> None:
        saved = sum(self.kept_now())
        self.saved_by_action[action] = saved
        self.saved = max(self.saved, saved)
        between = kept_state().microbatches.values()
        buffers = [both for kept in between for both in kept.attention.values()]
        tensors = []
        for buffer in chain.from_iterable(buffers):
            tensors += [t for t in (buffer.tokens, buffer.gradient) if t is not None]
        self.kept = max(self.kept, _storage_bytes(tensors))

    def kept_now(self) -> tuple[int, int]:
        """Return the bytes that autograd keeps, and those of the operands of W."""
        outputs = [
            tensor
            for _, live_outputs in self.compute._live.values()
            for tensor in live_outputs
        ]
        waiting = in_force().splits._waiting.values()
        operands = [
            tensor
            for by_weight in waiting
            for gradient in chain.from_iterable(by_weight.values())
            for tensor in vars(gradient).values()
            if isinstance(tensor, torch.Tensor)
            and not isinstance(tensor, torch.nn.Parameter)
        ]
        return kept_bytes(outputs, self.model), _storage_bytes(operands)


class Waiting(NamedTuple):
    """What a rank keeps whose W wait, in bytes."""

    peak: int
    bound: float
    """The peak according to the rank's table and the bytes of one micro-batch."""
    num_waiting: int
    """Most W that wait at once in the table."""


def with_waiting_weights(num_waiting: int, *, runs_early: bool) -> list[Waiting]:
    """Train one step of a model with experts in pairs; return the memory of each rank.

    Args:
        num_waiting: W that may wait beyond those of the table.
        runs_early: Whether W may run before their place in the table.
    """
    flags = (
        f"{_TRAINING}{_MODELS['experts']}--global-batch-size {4 * _NUM_MICROBATCHES} "
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 "
        "--pipeline-schedule zb-h1 --overlap-moe-expert-parallel-comm "
        f"--pipeline-waiting-weights {num_waiting} "
    )
    return run_ranks(4, measure_waiting, flags.split(), runs_early, timeout_s=300)


def measure_waiting(argv: list[str], runs_early: bool) -> Waiting:
    """Train as one rank; return what it keeps."""
    devices.current()  # must come before Megatron is imported
    import torch.distributed as dist
    from megatron.training import training

    from megatron_ext.features.pairs.waiting_weights import HostWeights

    if not runs_early:  # as if peers were never late
        HostWeights.await_peers = lambda _weights, group: dist.barrier(group)  # type: ignore[method-assign]
    set_up = training.setup_model_and_optimizer
    counters: list[CountingWaits] = []

    @functools.wraps(set_up)
    def counting(*args: Any, **kwargs: Any) -> Any:
        set_up_model = set_up(*args, **kwargs)
        counters.append(CountingWaits(torch.nn.ModuleList(set_up_model[0])))
        required().observers.append(counters[0])
        return set_up_model

    training.setup_model_and_optimizer = counting
    train_here("gpt", argv)
    [counter] = counters
    return counter.result()


class CountingWaits(Counting):
    """Compares what a rank keeps after each action with its table."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.kept_after: list[tuple[int, int]] = []
        """By action of the row: bytes that autograd keeps, and those of operands."""

    def end_action(self, position: int, action: Action) -> None:
        self.kept_after.append(self.kept_now())

    def result(self) -> Waiting:
        """Return the peak, and the peak that the table allows."""
        schedule, rank = self.compute.table.schedule, self.compute.table.rank
        row, pair_begins = schedule.rows[rank], schedule.pairs_of(rank)
        microbatch_bytes, _ = self.kept_after[0]  # after the first forward
        first_input = next(i for i, action in enumerate(row) if action.kind == "I")
        # Actions of a pair end together.
        if first_input in pair_begins:
            first_input += 1
        _, weight_bytes = self.kept_after[first_input]
        num_live = num_waiting = most_waiting = 0
        bound = 0.0
        for position, action in enumerate(row):
            num_live += {"F": 1, "I": -1}.get(action.kind, 0)
            num_waiting += {"I": 1, "W": -1}.get(action.kind, 0)
            if position not in pair_begins:
                most_waiting = max(most_waiting, num_waiting)
                in_use = num_live * microbatch_bytes + num_waiting * weight_bytes
                bound = max(bound, in_use)
        peak = max(sum(kept) for kept in self.kept_after)
        return Waiting(peak, bound, most_waiting)


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the total bytes of the tensors' storages, each counted once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors
    }
    return sum(storages.values())
