"""Trains a small GPT on micro-batches of given lengths, in one pipeline or several."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import unwrap_model

from megatron_ext import begin_iteration, devices
from megatron_ext.runtime.runtime import in_force
from megatron_ext.schedules.table.placement import linear
from megatron_ext.transport.torch_dist import groups_of_ranks
from tests.pipelines import make_pipeline, use
from tests.planning.model_memory import Counting
from tests.runtime.small_gpt import VOCABULARY

if TYPE_CHECKING:
    from megatron_ext.schedules.table.actions import Action, Schedule

NUM_LAYERS = 4
LEARNING_RATE = 0.05
Item = dict[str, torch.Tensor]
Lengths = Sequence[int | Sequence[int]]
"""By micro-batch: its tokens, or those of each sample that is packed into it."""


@dataclass(frozen=True)
class Job:
    """What to train: each of `steps` has the lengths of one step by replica."""

    steps: Sequence[Sequence[Lengths]]
    schedule: str | None = "1f1b"
    """None: Megatron's own."""
    pp: int = 1
    tp: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of `PipelineConfig`."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of `TransformerConfig`."""
    max_positions: int = 64
    positions: str = "rope"
    """How the model embeds positions (`position_embedding_type`)."""
    is_packed: bool = False
    """Whether micro-batches have `cu_seqlens`."""
    only_first_reads: bool = False
    """Whether only the first of the tensor-parallel ranks has data, as in Megatron's script."""
    is_tied: bool = False
    rows: int = 1
    """Sequences in a micro-batch."""
    seed: int | None = None
    """Of random numbers by micro-batch, for models with dropout."""
    ep: int = 1
    """Ranks that share experts, out of the replicas."""
    measures_memory: bool = False
    evaluates: bool = False
    """Whether log-probabilities of tokens precede each step, and an evaluation follows it."""

    @property
    def num_ranks(self) -> int:
        """The processes that it takes."""
        return self.pp * self.tp * len(self.steps[0])


@dataclass
class Trained:
    """The results of one rank."""

    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """After the last step, by the name in the whole model and the tensor-parallel rank."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the last step, by the same names."""
    reports: list[list[float]] = field(default_factory=list)
    """Of all steps and evaluations, on the rank of the last stage."""
    log_probabilities: list[torch.Tensor] = field(default_factory=list)
    """Of the tokens of each micro-batch, `[b, s]`, on the rank of the last stage."""
    steps_s: list[float] = field(default_factory=list)
    """Seconds of each training step on this rank."""
    tables_s: float = 0.0
    """Seconds in which these steps waited for their tables."""
    kept_bytes: dict[Action, int] = field(default_factory=dict)
    """What autograd and waiting weight gradients keep after each action of the last step, if the
    job measures it."""
    sizes: dict[Action, float] = field(default_factory=dict)
    """By action of this rank's row, in order: its tokens, relative to the longest micro-batch."""


def items(job: Job, step: int, replica: int) -> Iterator[Item]:
    """Yield the micro-batches of a step."""
    for place, length in enumerate(job.steps[step][replica]):
        samples = [length] if isinstance(length, int) else list(length)
        length = sum(samples)
        generator = torch.Generator().manual_seed(place + 100 * replica + 1000 * step)
        shape = (job.rows, length + 1)
        tokens = torch.randint(VOCABULARY, shape, generator=generator)
        item = {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "position_ids": torch.arange(length).repeat(job.rows, 1),
            "loss_mask": (tokens[:, 1:] % 5 > 0).float(),
        }
        if job.is_packed:
            bounds = list(accumulate(samples, initial=0))
            item["cu_seqlens"] = torch.tensor([bounds], dtype=torch.int32)
        yield item


def forward_step(
    data: Iterator[Item] | None, model: Any, host_group: Any = None
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Run a stage on a micro-batch, or on a slice of it.

    In `host_group`, only the first rank has data.
    """
    stage: Any = unwrap_model(model)
    device = next(stage.parameters()).device
    item: Any = None if data is None else next(data)
    if host_group is not None:
        received = [item]
        first_rank, *_ = torch.distributed.get_process_group_ranks(host_group)
        torch.distributed.broadcast_object_list(received, first_rank, host_group)
        [item] = received
    item = {name: tensor.to(device, non_blocking=True) for name, tensor in item.items()}
    packed = None
    if "cu_seqlens" in item:
        bounds = item["cu_seqlens"][0]
        longest = stage.max_sequence_length
        packed = PackedSeqParams("thd", bounds, bounds, None, None, longest, longest)
    output = model(
        item["tokens"],
        item["position_ids"],
        None,
        labels=item["labels"] if stage.post_process else None,
        packed_seq_params=packed,
        loss_mask=item["loss_mask"],
    )

    def loss(losses: torch.Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return -losses.detach()
        total = (losses * item["loss_mask"]).sum()
        count = item["loss_mask"].sum().int()
        return total, count, {"loss": torch.stack([total.detach(), count])}

    return output, loss


def chunk_of(job: Job, config: Any, stage: int, num_stages: int, vp: int | None) -> Any:
    """Return a stage of the model, whose weights do not depend on the number of stages."""
    spec = gpt_layer_specs.get_gpt_layer_local_spec(
        config.num_moe_experts, qk_layernorm=config.qk_layernorm
    )
    mtp = None
    if config.mtp_num_layers and stage == num_stages - 1:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=False, vp_stage=vp
        )
    chunk = GPTModel(
        config,
        spec,
        VOCABULARY,
        job.max_positions,
        pre_process=stage == 0,
        post_process=stage == num_stages - 1,
        share_embeddings_and_output_weights=job.is_tied,
        position_embedding_type=job.positions,
        mtp_block_spec=mtp,
        vp_stage=vp,
    )
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in chunk.named_parameters():
        seed = sum(whole_name(name, stage, num_stages).encode())
        if getattr(parameter, "tensor_model_parallel", False):
            seed += 100_000 * tp_rank
        if job.is_tied and name == "output_layer.weight":
            # The copy on the last stage, whose original is on the first one.
            seed = sum(b"embedding.word_embeddings.weight") + 100_000 * tp_rank
        generator = torch.Generator().manual_seed(seed)
        if parameter.dim() > 1:
            parameter.data.copy_(
                torch.randn(parameter.shape, generator=generator) * 0.2
            )
    return chunk


def whole_name(name: str, stage: int, num_stages: int) -> str:
    """Return the name that a parameter of a stage has in the whole model."""
    parts = name.removeprefix("module.").split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + stage * NUM_LAYERS // num_stages)
    return ".".join(parts)


def _chunks(job: Job, placement: Any, num_chunks: int | None, device: Any) -> list[Any]:
    """Return the stages of this rank."""
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        **{
            "num_layers": NUM_LAYERS,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "ffn_hidden_size": 64,
            "use_cpu_initialization": True,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "masked_softmax_fusion": False,
            "gradient_accumulation_fusion": False,
            "persist_layer_norm": False,
            "pipeline_dtype": torch.float32,
            "deallocate_pipeline_outputs": True,
            "variable_seq_lengths": True,
            "moe_token_dispatcher_type": "alltoall",
            "tensor_model_parallel_size": job.tp,
            "pipeline_model_parallel_size": job.pp,
            "virtual_pipeline_model_parallel_size": num_chunks,
            "expert_model_parallel_size": job.ep,
            **job.model,
        }
    )
    config.timers = None
    config.finalize_model_grads_func = finalize_model_grads
    rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks = []
    for vp_stage, stage in enumerate(placement.stages_of[rank]):
        virtual = None if num_chunks is None else vp_stage
        chunk = chunk_of(job, config, stage, placement.num_stages, virtual)
        chunk = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(),
            chunk.to(device),
            disable_bucketing=True,
        )
        chunks.append(chunk)
    return chunks


def _data(job: Job, step: int, num_chunks: int) -> list[Iterator[Item] | None]:
    """Return the data of each stage of this rank."""
    replica = parallel_state.get_data_parallel_rank()
    if job.only_first_reads and parallel_state.get_tensor_model_parallel_rank() > 0:
        return [None] * num_chunks
    return [items(job, step, replica) for _ in range(num_chunks)]


def _step_function(job: Job) -> Callable[..., Any]:
    """Return the forward step of this rank. Collective over the job."""
    if not job.only_first_reads:
        return forward_step
    members = tuple(
        torch.distributed.get_process_group_ranks(
            parallel_state.get_tensor_model_parallel_group()
        )
    )
    host_groups = groups_of_ranks([members], 60.0, backend="gloo")
    return partial(forward_step, host_group=host_groups[members])


def _sizes(schedule: Schedule, rank: int) -> dict[Action, float]:
    """Return the size of the slice of each action of a rank (`Trained.sizes`)."""
    sizes = {}
    for action in schedule.rows[rank]:
        sizes[action] = schedule.sizes_of(action.microbatch)[action.slice]
    return sizes


def _keep_weights(
    trained: Trained, chunk_by_stage: dict[int, Any], num_stages: int
) -> None:
    """Keep this rank's weights and their gradients."""
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    for stage, chunk in chunk_by_stage.items():
        for name, parameter in chunk.named_parameters():
            key = f"{whole_name(name, stage, num_stages)}, {tp_rank}"
            trained.gradients[key] = parameter.main_grad.cpu()
            trained.weights[key] = parameter.data.cpu()


def train(job: Job) -> Trained:
    """Train on this rank, on the device that is in force."""
    backend = devices.current()
    rank = int(os.environ["RANK"])
    backend.bind(rank)
    device = backend.torch_device(rank)
    num_microbatches = len(job.steps[0][0])
    pipeline, num_chunks = None, None
    placement = linear(job.pp)
    if job.schedule is not None:
        pipeline = make_pipeline(job.schedule, job.pp, num_microbatches, **job.settings)
        placement = pipeline.placement
    if placement.num_stages > job.pp:
        num_chunks = placement.num_stages // job.pp
    # Folded pipelines change Megatron's groups, so the schedule comes first.
    configuration = use(pipeline, seed=job.seed)
    torch.distributed.init_process_group(backend.distributed_backend)
    parallel_state.initialize_model_parallel(
        job.tp,
        job.pp,
        virtual_pipeline_model_parallel_size=num_chunks,
        expert_model_parallel_size=job.ep,
    )
    chunks = _chunks(job, placement, num_chunks, device)
    replica = parallel_state.get_data_parallel_rank()
    trained = Trained()
    counter = Counting(torch.nn.ModuleList(chunks))
    if job.measures_memory:
        configuration.observers.append(counter)

    step_function = _step_function(job)

    def run(step: int, **keywords: Any) -> list[Any]:
        reports: list[Any] = get_forward_backward_func()(
            forward_step_func=step_function,
            data_iterator=_data(job, step, len(chunks)),
            model=chunks if num_chunks else chunks[0],
            num_microbatches=len(job.steps[step][replica]),
            seq_length=job.max_positions,
            micro_batch_size=job.rows,
            **keywords,
        )
        return reports

    for step in range(len(job.steps)):
        if step > 0:
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.data.add_(parameter.main_grad, alpha=-LEARNING_RATE)
        for chunk in chunks:
            chunk.zero_grad_buffer()
        if job.seed is not None:
            begin_iteration(step)
        if job.evaluates:
            with torch.no_grad():
                trained.log_probabilities += run(
                    step, forward_only=True, collect_non_loss_data=True
                )
        torch.distributed.barrier()
        begin_s = time.perf_counter()
        reports = run(step)
        trained.steps_s.append(time.perf_counter() - begin_s)
        trained.reports += [report["loss"].tolist() for report in reports]
        if job.evaluates:
            with torch.no_grad():
                reports = run(step, forward_only=True)
                trained.reports += [report["loss"].tolist() for report in reports]
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    stages = placement.stages_of[pp_rank]
    _keep_weights(trained, dict(zip(stages, chunks, strict=True)), placement.num_stages)
    if job.measures_memory:
        trained.kept_bytes = counter.saved_by_action
        trained.sizes = _sizes(counter.compute.table.schedule, pp_rank)
    if pipeline is not None:
        [runtime] = in_force()
        trained.tables_s = runtime.measured.tables_s
    return trained
