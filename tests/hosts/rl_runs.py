"""Runs the training steps of RL frameworks, with their own code, on a tiny GPT."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import torch

import megatron_ext
from tests.hosts import stand_ins

RANKS = 4
MICROBATCHES = 8
LENGTH = 16
VOCABULARY = 64


def _configure(schedule: str | None, **settings: Any) -> None:
    """Configure as described in docs/rl.md; without a schedule, do nothing."""
    if schedule is None:
        return
    megatron_ext.configure(
        megatron_ext.PipelineConfig(schedule=schedule, transport="shm", **settings),
        pipeline_ranks=RANKS,
        num_microbatches=MICROBATCHES,
        num_layers=2 * RANKS,
    )


def _tokens(sample: int) -> torch.Tensor:
    """Return the tokens of a sample: [LENGTH]."""
    return torch.randint(
        VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(sample)
    )


def _init(weight: torch.Tensor) -> None:
    torch.nn.init.normal_(
        weight, std=0.1, generator=torch.Generator().manual_seed(weight.numel())
    )


def _chunks(**settings: Any) -> list[Any]:
    """Build this rank's part of the model as the frameworks do: first groups, then the model.

    Args:
        **more: Of its `TransformerConfig`.
    """
    from megatron.core import distributed, parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import TransformerConfig

    class Unpacked(GPTModel):
        """Unpacks a packed micro-batch's only sequence, because CPU attention rejects packing."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            for name in ("packed_seq_params", "loss_mask"):
                kwargs.pop(name, None)
            return super().forward(*args, **kwargs)

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2 * RANKS,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method=_init,
        output_layer_init_method=_init,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=RANKS,
        transformer_impl="local",
        finalize_model_grads_func=distributed.finalize_model_grads,
        **settings,
    )
    model = Unpacked(
        config,
        gpt_layer_specs.get_gpt_layer_local_spec(),
        VOCABULARY,
        LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
    )
    ddp = distributed.DistributedDataParallelConfig()
    return [distributed.DistributedDataParallel(config, ddp, model)]


def _weights(chunks: list[Any]) -> str:
    digest = blake2b()
    for parameter in chunks[0].parameters():
        digest.update(parameter.detach().numpy().tobytes())
        digest.update(parameter.main_grad.numpy().tobytes())
    return digest.hexdigest()


class _Sgd:
    """Plain gradient descent with the few optimizer methods that a step calls."""

    def __init__(self, chunks: list[Any]) -> None:
        self.parameters = list(chunks[0].parameters())

    def zero_grad(self) -> None:
        pass

    def step(self) -> tuple[bool, float, int]:
        for parameter in self.parameters:
            parameter.data -= 0.1 * parameter.main_grad
        return True, 0.0, 0


def _ran() -> int:
    """Return the number of steps run by our runtime."""
    from megatron_ext.config import active
    from megatron_ext.runtime import runtime

    return runtime.totals()[0].steps if active.pipeline() is not None else 0


def slime(path: str, schedule: str | None) -> tuple[list[Any], str, int]:
    """Run `train_one_step` of slime three times."""
    sys.path.insert(0, path)
    stand_ins.install()
    from megatron.training.global_vars import set_args
    from slime.backends.megatron_utils.data import DataIterator
    from slime.backends.megatron_utils.model import train_one_step
    from slime.utils.accelerator.torch_accelerator import TorchAccelerator

    TorchAccelerator.current_device = lambda self: (
        0
    )  # it requires a number, and the host has none
    _configure(schedule)
    chunks = _chunks()
    args = Namespace(
        allgather_cp=False,
        calculate_per_token_loss=False,
        check_for_nan_in_loss_and_grad=True,
        ci_test=False,
        custom_loss_function_path="tests.hosts.rl_runs.slime_loss",
        custom_megatron_before_train_step_hook_path=None,
        data_pad_size_multiplier=1,
        decoder_seq_length=None,
        enable_mtp_training=False,
        loss_type="custom_loss",
        micro_batch_size=1,
        recompute_loss_function=False,
        save_debug_train_data=None,
        seq_length=LENGTH,
        rollout_top_p=1.0,
    )
    set_args(args)
    scheduler = Namespace(step=lambda increment: None)
    steps = []
    for step in range(3):
        samples = [_tokens(MICROBATCHES * step + i) for i in range(MICROBATCHES)]
        rollout = {
            "tokens": samples,
            "loss_masks": [torch.ones(LENGTH - 4) for _ in samples],
            "total_lengths": [LENGTH for _ in samples],
            "response_lengths": [LENGTH - 4 for _ in samples],
            "rollout_mask_sums": [torch.tensor(float(LENGTH - 4)) for _ in samples],
        }
        iterator = DataIterator(rollout, [[i] for i in range(MICROBATCHES)])
        losses, _ = train_one_step(
            args,
            0,
            step,
            [iterator],
            chunks,
            _Sgd(chunks),
            scheduler,
            MICROBATCHES,
            MICROBATCHES,
        )
        steps.append({name: float(loss).hex() for name, loss in losses.items()})
    return steps, _weights(chunks), _ran()


def slime_loss(
    _args: Any, batch: dict[str, Any], logits: torch.Tensor, mean: Callable[..., Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of predicting a response; slime loads this function by its path."""
    tokens, length = batch["unconcat_tokens"][0], batch["response_lengths"][0]
    predicted = logits[0, LENGTH - length - 1 : -1].float()
    losses = torch.nn.functional.cross_entropy(
        predicted, tokens[-length:], reduction="none"
    )
    loss = mean(losses)
    return loss, {"loss": loss.detach().clone()}


def nemo_rl(path: str, schedule: str | None) -> tuple[list[Any], str, int]:
    """Run `megatron_forward_backward` of NeMo-RL, with its loss for fine-tuning, three times."""
    sys.path.insert(0, path)
    stand_ins.install(
        mlflow=(), swanlab=(), matplotlib=("pyplot",)
    )  # loggers that it imports
    from nemo_rl.algorithms.loss import NLLLossFn
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.models.megatron.data import ProcessedMicrobatch
    from nemo_rl.models.megatron.train import (
        LossPostProcessor,
        megatron_forward_backward,
    )

    _configure(schedule)
    chunks = _chunks()
    steps = []
    for step in range(3):
        batches = []
        for i in range(MICROBATCHES):
            tokens = _tokens(MICROBATCHES * step + i)[None]
            data = BatchedDataDict(
                input_ids=tokens,
                token_mask=torch.ones(1, LENGTH),
                sample_mask=torch.ones(1),
            )
            batches.append(
                ProcessedMicrobatch(
                    data, tokens, tokens, None, torch.arange(LENGTH)[None], None, None
                )
            )
        for chunk in chunks:
            chunk.zero_grad_buffer()
        losses = megatron_forward_backward(
            model=chunks[0],
            data_iterator=iter(batches),
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            mbs=1,
            post_processing_fn=LossPostProcessor(
                NLLLossFn(), {"sequence_packing": {"enabled": False}}, MICROBATCHES
            ),
            global_valid_seqs=torch.tensor(MICROBATCHES),
            global_valid_toks=torch.tensor(MICROBATCHES * (LENGTH - 1)),
        )
        _Sgd(chunks).step()
        steps.append([float(loss["loss"]).hex() for loss in losses])
    return steps, _weights(chunks), _ran()


def verl(path: str, schedule: str | None) -> tuple[list[Any], str, int]:
    """Run `forward_backward_batch` of verl's Megatron engine, for fine-tuning, three times."""
    sys.path.insert(0, path)
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.workers.engine.megatron import transformer_impl

    transformer_impl.get_device_id = lambda: (
        "cpu"
    )  # it requires a number, and the host has none
    _configure(schedule, variable_seq_lengths=True)
    chunks = _chunks(variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")
    engine = object.__new__(transformer_impl.MegatronEngineWithLMHead)
    engine.module, engine.tf_config = chunks, chunks[0].config
    engine.engine_config = Namespace(context_parallel_size=1, use_remove_padding=False)
    engine.model_config = Namespace(
        hf_config=Namespace(architectures=["LlamaForCausalLM"]),
        tokenizer=Namespace(pad_token_id=0),
    )
    steps = []
    for step in range(3):
        samples = [
            _tokens(MICROBATCHES * step + i)[: LENGTH - i] for i in range(MICROBATCHES)
        ]
        nested = [
            torch.nested.as_nested_tensor(part, layout=torch.jagged)
            for part in (samples, [torch.ones_like(sample) for sample in samples])
        ]
        batch = TensorDict(
            {
                "input_ids": nested[0],
                "loss_mask": nested[1],
                "temperature": torch.ones(MICROBATCHES),
            },
            batch_size=[MICROBATCHES],
        )
        tensordict_utils.assign_non_tensor(
            batch, use_dynamic_bsz=False, micro_batch_size_per_gpu=1
        )
        for chunk in chunks:
            chunk.zero_grad_buffer()
        output = engine.forward_backward_batch(batch, verl_loss)
        _Sgd(chunks).step()
        steps.append([loss.hex() for loss in output["loss"]] if output else [])
    return steps, _weights(chunks), _ran()


def verl_loss(
    model_output: dict[str, Any], data: Any, dp_group: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the mean loss of a micro-batch's tokens."""
    loss = -model_output["log_probs"].values().sum() / data["batch_num_tokens"]
    return loss, {}
