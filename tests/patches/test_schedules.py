"""Each patch of the table, and what upstream does without it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.patches.single import without
from tests.ranks import run_ranks, start_ranks

_NUMEL = 1 << 20  # large enough for the allocator to give freed memory back at once


def overlapped_send(patched: bool) -> float:
    """Free an output while it is being sent, as the interleaved schedule does; return the error."""
    if not patched:
        with without("pipeline.sends_own_storage"):
            return _send_and_free()
    return _send_and_free()


def _send_and_free() -> float:
    import time

    import torch
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor
    from torch import distributed as dist

    dist.init_process_group("nccl")
    group = dist.new_group([0, 1])
    sends = dist.get_rank() == 0
    output = torch.full((_NUMEL,), 7.0) if sends else None
    received = None if sends else torch.empty(_NUMEL)
    dist.barrier()
    if not sends:
        time.sleep(0.3)  # the sender frees its output before anybody takes it
    requests = p2p_communication._p2p_ops(
        tensor_send_prev=None,
        tensor_recv_prev=received,
        tensor_send_next=output,
        tensor_recv_next=None,
        group=group,
        prev_pipeline_rank=0,
        next_pipeline_rank=1,
    )
    if sends:
        deallocate_output_tensor(output, deallocate_pipeline_outputs=True)
        assert output.numel() == 1
        junk = [torch.zeros(_NUMEL) for _ in range(4)]
        del junk
    for request in requests.values():
        request.wait()
    return 0.0 if received is None else (received - 7.0).abs().max().item()


def test_a_freed_output_arrives() -> None:
    assert run_ranks(2, overlapped_send, True) == [0.0, 0.0]


def test_without_the_patch_it_does_not() -> None:
    for _ in range(3):  # a sender that is slow to free could be lucky
        run = start_ranks(2, overlapped_send, False, timeout_s=60)
        if run.exit_codes != [0, 0] or run.values != [0.0, 0.0]:
            return
    pytest.fail("upstream keeps the storage now: the patch can go")


def holders() -> None:
    """A sent tensor shares storage with the output but is another tensor, so both can be freed."""
    import torch
    from megatron.core.pipeline_parallel import p2p_communication
    from torch import distributed as dist

    dist.init_process_group("nccl")
    sent = []
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(dist, "isend", lambda tensor, **_kwargs: sent.append(tensor))
        output = torch.ones(3, requires_grad=True) * 2
        p2p_communication._p2p_ops(
            tensor_send_prev=output,
            tensor_recv_prev=None,
            tensor_send_next=None,
            tensor_recv_next=None,
            group=dist.group.WORLD,
            prev_pipeline_rank=0,
            next_pipeline_rank=0,
        )
    assert sent[0] is not output
    assert sent[0].data_ptr() == output.data_ptr()
    assert not sent[0].requires_grad


def test_sends_are_aliases() -> None:
    run_ranks(1, holders)


def checked_configurations() -> list[int]:
    """Build as many configurations before the first step as after it; return the checks so far."""
    from types import SimpleNamespace

    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_ext.config import active, incompatible
    from tests.ranks import parse

    sizes = "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --lr 1e-3 "
    sizes += (
        "--max-position-embeddings 16 --micro-batch-size 1 --train-iters 1 --mock-data "
    )
    sizes += "--tokenizer-type NullTokenizer --vocab-size 16 --pipeline-model-parallel-size 2 "
    parse("gpt", (sizes + "--pipeline-schedule zb-h1").split(), {"WORLD_SIZE": "2"})
    checks: list[int] = []
    incompatible.refuse_built = lambda *_: checks.append(
        1
    )  # this process is a rank and ends
    so_far = []
    for runtimes in (None, SimpleNamespace(close=lambda: None)):
        active.required().runtimes = runtimes
        TransformerConfig(num_layers=4, hidden_size=16, num_attention_heads=2)
        so_far.append(len(checks))
    return so_far


def test_configurations_of_micro_batches_are_not_checked(a_training_loop: None) -> None:
    """Megatron's scripts make one for each, of flags that were checked; it took 0.3 ms."""
    assert run_ranks(1, checked_configurations) == [[1, 1]]


def tokens_counted(
    schedule: str, settings: dict[str, object], calls: int
) -> tuple[float, float]:
    """Count two packed sequences as often as a rank's stages and slices read a micro-batch."""
    import torch
    from megatron.training import training

    from megatron_ext import PipelineConfig, configure
    from megatron_ext.config import active
    from megatron_ext.features.slices.sliced_layers import SLICES

    sizes = {"pipeline_ranks": 2, "num_microbatches": 2, "num_layers": 4}
    configure(PipelineConfig(schedule=schedule, **settings), **sizes)
    running = SimpleNamespace(number=0)
    if "slices" in settings or "slice_tokens" in settings:
        kept = {SLICES: SimpleNamespace(running=running)}
        active.active().runtimes = SimpleNamespace(
            kept_by_feature=kept, close=lambda: None
        )
    for running.number in range(calls):
        bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
        training.update_seqlen_stats_from_cu_seqlens(bounds)
    return training.consume_seqlen_stats_in_iteration()


@pytest.mark.parametrize(
    ("schedule", "settings", "calls"),
    [
        ("zb-h1", {}, 1),
        ("zb-v", {}, 2),
        ("zb-h1", {"slices": 4}, 4),
        ("zb-h1", {"slice_tokens": 4, "variable_seq_lengths": True}, 2),
    ],
)
def test_packed_tokens_count_once(
    schedule: str, settings: dict[str, object], calls: int, a_training_loop: None
) -> None:
    """The statistics of throughput and of a checkpoint's operations, from 0.18 on."""
    from megatron.training import training

    if not hasattr(training, "consume_seqlen_stats_in_iteration"):
        pytest.skip("this Megatron counts no packed sequences")
    assert run_ranks(1, tokens_counted, schedule, settings, calls) == [(8.0, 34.0)]
