"""Peak of what a real model on one rank keeps for its backwards, beside what its table says."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.transformer import TransformerConfig

from megatron_ext.config.active import Active, Pipeline, activate_configuration, required
from megatron_ext.config.pipeline_config import DynamicOrder, PipelineConfig
from megatron_ext.runtime.entry import forward_backward
from megatron_ext.runtime.executor import Observer
from megatron_ext.runtime.runtime import Runtimes
from megatron_ext.runtime.sliced_compute import KeptState
from megatron_ext.schedules.table.memory import measure as memory_of
from megatron_ext.tracing.activations import kept_bytes

from .ops import HIDDEN, Peaks

if TYPE_CHECKING:
    from megatron_ext.runtime.compute import StageCompute
    from megatron_ext.schedules.table.actions import Action

__all__ = ["Counting", "measure", "storage_bytes"]

_VOCABULARY = 64


class Counting(Observer):
    """Counts after each action what the rank keeps."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.saved, self.kept = model, 0, 0
        self.compute: Any = None

    def begin_step(self, compute: StageCompute) -> None:
        """Take what has the live tensors."""
        self.compute = compute

    def end_action(self, position: int, action: Action) -> None:
        """Count."""
        outputs = [tensor for _, made in self.compute._live.values() for tensor in made]
        waiting = required().state(Runtimes).splits._waiting.values()
        operands = [
            tensor
            for gradients in waiting
            for gradient in gradients
            for tensor in vars(gradient).values()
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, torch.nn.Parameter)
        ]
        self.saved = max(self.saved, kept_bytes(outputs, self.model) + storage_bytes(operands))
        between = required().state(KeptState).microbatches.values()
        pairs = [pair for kept in between for pair in kept.attention.values()]
        tensors = [
            t
            for pair in pairs
            for kept in pair
            for t in (*kept.made.values(), *kept.gradients.values())
        ]
        self.kept = max(self.kept, storage_bytes(tensors))


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the memory of tensors, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def measure(
    schedule: str,
    pp: int,
    num_microbatches: int,
    slices: int,
    length: int,
    dynamic: bool = False,
) -> Peaks:
    """Train one step of a GPT as one of `pp` ranks.

    Args:
        schedule: A registered schedule with one stage on each rank.
        pp: Ranks of the pipeline.
        num_microbatches: Of one sample each.
        slices: Of each micro-batch.
        length: Tokens of a sample.
        dynamic: Whether ranks choose the order, with `--use-dpp --dpp-extra-activations 0`.
    """
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=300))
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pp)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    order = DynamicOrder(extra_activations=0) if dynamic else None
    chosen = PipelineConfig(schedule=schedule, slices=slices, transport="shm", dynamic=order)
    pipeline = Pipeline(chosen, pp, num_microbatches)
    activate_configuration(Active(pipeline.config, pipeline))
    config = TransformerConfig(
        num_layers=pp,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        deallocate_pipeline_outputs=True,
        recompute_granularity="selective",
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
    )
    rank = parallel_state.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config,
        gpt_layer_specs.get_gpt_layer_local_spec(),
        _VOCABULARY,
        length,
        pre_process=rank == 0,
        post_process=rank == pp - 1,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    tokens = torch.arange(length)[None] % _VOCABULARY
    batch = {"tokens": tokens, "labels": tokens, "position_ids": torch.arange(length)[None]}
    counting = Counting(model)
    required().observers.append(counting)

    def step(data: Any, chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        item = next(data)
        output = chunk(item["tokens"], item["position_ids"], None, labels=item["labels"])

        def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            count = torch.tensor(losses.numel())
            return losses.sum(), count, {"loss": torch.stack([losses.detach().sum(), count])}

        return output, loss

    forward_backward(
        forward_step_func=step,
        data_iterator=iter([batch] * num_microbatches),
        model=[model],
        num_microbatches=num_microbatches,
        seq_length=length,
        micro_batch_size=1,
    )
    planned = memory_of(counting.compute.table.schedule)
    keys = planned.keys_and_values or (0.0,) * pp
    return Peaks(counting.saved, counting.kept, planned.activations[rank], keys[rank])
