"""The emulated MUSA device trains a small GPT as the CPU does: same weights, same losses.

Straight on `megatron.core`, so that it runs without a Megatron-LM tree. The training code below
spells CUDA and NCCL throughout, as upstream does; which device that means is the harness's choice.
"""

import os

import pytest
import torch

from tests.ranks import losses, run_ranks, run_script
from tests.training import helpers

_SEED = 7
_STEPS = 3
_MICRO_BATCHES = 4
_MICRO_BATCH_SIZE = 2
_SEQ_LENGTH = 16
_VOCAB = 64


def _model(parallel_state, tp, pp, options):
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = options.get("dtype", torch.float32)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        sequence_parallel=options.get("sequence_parallel", False),
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        hidden_dropout=options.get("dropout", 0.0),
        attention_dropout=options.get("dropout", 0.0),
        recompute_granularity=options.get("recompute"),
        recompute_method="uniform" if options.get("recompute") else None,
        recompute_num_layers=1 if options.get("recompute") else None,
        deallocate_pipeline_outputs=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=_VOCAB,
        max_sequence_length=_SEQ_LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=options.get("tied", False),
    )
    return config, model.cuda(torch.cuda.current_device())


def _wrapped(config, model, options):
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    sharded = options.get("distributed_optimizer", False)
    overlap = options.get("overlap", False)
    settings = DistributedDataParallelConfig(
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and sharded,
        use_distributed_optimizer=sharded,
        grad_reduce_in_fp32=True,
        average_in_collective=options.get("average", False),
    )
    if config.bf16:
        model = Float16Module(config, model)
    ddp = DistributedDataParallel(config, settings, model)
    ddp.broadcast_params()
    if overlap:
        config.no_sync_func = ddp.no_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=sharded,
            overlap_param_gather=settings.overlap_param_gather,
            clip_grad=1.0,
        ),
        [ddp],
    )
    return ddp, optimizer


def _batches(dp_rank):
    """Yield the micro-batches of a step, the same in each step, so that they can be learned."""
    generator = torch.Generator().manual_seed(dp_rank)
    for _ in range(_MICRO_BATCHES):
        shape = (_MICRO_BATCH_SIZE, _SEQ_LENGTH + 1)
        yield torch.randint(_VOCAB, shape, generator=generator).cuda(non_blocking=True)


def _forward_step(data_iterator, model):
    text = next(data_iterator)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    positions = torch.arange(_SEQ_LENGTH, device="cuda").expand_as(tokens)
    mask = torch.ones(1, 1, _SEQ_LENGTH, _SEQ_LENGTH, device="cuda").triu(1).bool()

    def loss_function(output):
        loss = output.float().mean()
        return loss, {"loss": loss.detach().clone()}

    return model(tokens, positions, mask, labels=labels), loss_function


def train(tp, pp, options):
    """Train on this rank; return where it ran, the losses and the norms of all parameters."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(tp, pp)
    torch.manual_seed(_SEED)  # position embeddings are drawn on the host
    model_parallel_cuda_manual_seed(_SEED)
    config, model = _model(parallel_state, tp, pp, options)
    model, optimizer = _wrapped(config, model, options)
    losses = []
    for _step in range(_STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=_batches(parallel_state.get_data_parallel_rank()),
            model=model,
            num_microbatches=_MICRO_BATCHES,
            seq_length=_SEQ_LENGTH,
            micro_batch_size=_MICRO_BATCH_SIZE,
        )
        assert optimizer.step()[0]
        losses += [report["loss"].item() for report in reports]
    if options.get("overlap") and options.get("distributed_optimizer"):
        model.start_param_sync(force_sync=True)
    return {
        "device": next(model.parameters()).device.type,
        "backend": torch.distributed.get_backend(),
        "losses": losses,
        "norms": {
            name: p.float().norm().item() for name, p in model.named_parameters()
        },
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


_CASES = {
    "pp2": (2, 1, 2, {}),
    "pp2 tied embeddings": (2, 1, 2, {"tied": True}),
    "pp2 full recompute": (2, 1, 2, {"recompute": "full"}),
    "pp2 bf16": (2, 1, 2, {"dtype": torch.bfloat16}),
    "tp2": (2, 2, 1, {}),
    "tp2 sequence parallel": (2, 2, 1, {"sequence_parallel": True}),
    "dp2": (2, 1, 1, {}),
    "dp2 overlapped, averaged": (2, 1, 1, {"overlap": True, "average": True}),
    "dp2 distributed optimizer": (2, 1, 1, {"distributed_optimizer": True}),
    "dp2 distributed optimizer, both overlaps": (
        2, 1, 1, {"distributed_optimizer": True, "overlap": True},
    ),
    "pp2 dp2 distributed optimizer": (4, 1, 2, {"distributed_optimizer": True}),
}  # fmt: skip


@pytest.mark.usefixtures("emulated_musa")
@pytest.mark.parametrize("case", _CASES)
def test_losses_equal_those_of_the_cpu(case):
    ranks, tp, pp, options = _CASES[case]
    on_cpu = run_ranks(ranks, train, tp, pp, options, device="cpu")
    on_musa = run_ranks(ranks, train, tp, pp, options, device="musa")
    assert {rank["device"] for rank in on_cpu} == {"cpu"}
    assert {rank["device"] for rank in on_musa} == {"musa"}
    assert {rank["backend"] for rank in on_musa} == {"mccl"}
    for cpu, musa in zip(on_cpu, on_musa, strict=True):
        assert musa["losses"] == pytest.approx(cpu["losses"], rel=1e-6)
        assert musa["norms"] == pytest.approx(cpu["norms"], rel=1e-5, abs=1e-7)
    last = on_musa[-1]["losses"]
    assert len(last) == _STEPS * _MICRO_BATCHES
    assert last[-1] < last[_MICRO_BATCHES - 1]


@pytest.mark.usefixtures("emulated_musa")
def test_training_without_a_tree_is_that_on_the_cpu():
    flags = helpers.MOCK + helpers.NO_DROPOUT
    flags += "--pipeline-model-parallel-size 2 --use-distributed-optimizer"
    on_cpu, on_musa = (
        losses(run_script(2, "pretrain_gpt.py", flags.split(), device=device))
        for device in ("cpu", "musa")
    )
    assert len(on_cpu) == 3
    assert on_musa == pytest.approx(on_cpu, rel=1e-6)
