"""Each patch of the table that acts within megatron.core, and what upstream does without it.

Those on `megatron.training` are in `tests/runtime/test_placed_training.py`.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patches.single import start_parallel, without
from tests.ranks import run_ranks
from tests.training.helpers import MOCK

ZB_V = "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v "
_PREDICATES = tuple(
    f"placement.{name}"
    for name in (
        "is_pp_last_stage",
        "get_pp_last_rank",
        "is_pipeline_last_stage",
        "get_pipeline_model_parallel_last_rank",
        "embedding_groups",
    )
)


def last_stage(chosen: bool) -> list[Any]:
    """Answer who has the last stage, as upstream's functions do."""
    from megatron.core import parallel_state
    from megatron.core.distributed.finalize_model_grads import get_pp_last_rank
    from megatron.core.pipeline_parallel.utils import is_pp_last_stage
    from torch import distributed

    from tests.pipelines import make_pipeline, use

    use(make_pipeline("zb-v", pp=2, num_microbatches=4) if chosen else None)
    start_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2
    )
    group = parallel_state.get_pipeline_model_parallel_group()
    embedding = parallel_state.get_embedding_group(check_initialized=False)
    last = parallel_state.is_pipeline_last_stage
    return [
        is_pp_last_stage(group),
        get_pp_last_rank(group),
        parallel_state.get_pipeline_model_parallel_last_rank(),
        [
            last(),
            last(ignore_virtual=False, vp_stage=0),
            last(ignore_virtual=False, vp_stage=1),
        ],
        embedding and distributed.get_process_group_ranks(embedding),
    ]


def last_stage_unpatched() -> list[Any]:
    with without(*_PREDICATES):
        return last_stage(True)


def test_a_checkpoint_loads_without_the_arguments_of_a_schedule() -> None:
    """Tools of Megatron's load one with few arguments."""
    from megatron_ext.patches.folded_pipelines import _check_stages

    state = {"model": {}, "checkpoint_version": 3.0}
    loaded = (
        state,
        "folder/iter_0000001/mp_rank_00/model.pt",
        False,
        SimpleNamespace(name="LEGACY"),
    )
    assert (
        _check_stages(lambda *_: loaded, None, ("folder", SimpleNamespace()), {})
        is loaded
    )


def test_the_first_rank_has_the_last_stage() -> None:
    assert run_ranks(2, last_stage, True) == [
        [True, 0, 0, [True, False, True], [0]],
        [False, 0, 0, [False, False, False], None],
    ]


def test_without_a_choice_or_the_patches_the_last_rank_has_it() -> None:
    upstreams = [
        [False, 1, 1, [False, False, False], [0, 1]],
        [True, 1, 1, [True, False, True], [0, 1]],
    ]
    assert run_ranks(2, last_stage, False) == upstreams
    assert run_ranks(2, last_stage_unpatched) == upstreams


def _build(flags: str) -> tuple[Any, list[Any]]:
    """Start a training, and stop it where its model is built."""
    from megatron.core.utils import get_model_config

    from tests.ranks import train_here

    class Built(BaseException):
        pass

    training = import_module("megatron.training.training")
    set_up, chunks = training.setup_model_and_optimizer, list[Any]()

    def set_up_and_stop(*args: Any, **kwargs: Any) -> None:
        chunks.extend(set_up(*args, **kwargs)[0])
        raise Built

    training.setup_model_and_optimizer = (
        set_up_and_stop  # this process is a rank and ends
    )
    with pytest.raises(Built):
        train_here("gpt", flags.split())
    return get_model_config(chunks[0]), chunks


def shards(flags: str) -> tuple[list[list[int]], set[tuple[str, tuple[int, ...]]]]:
    """Build a model; return the layers of each chunk, and which shards a checkpoint would hold."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.utils import unwrap_model

    chunks = unwrap_model(_build(flags)[1])
    layers = [
        [layer.layer_number for layer in chunk.decoder.layers] for chunk in chunks
    ]
    found = [
        (tensor.key, tensor.global_offset)
        for chunk in chunks
        for tensor in nested_values(chunk.sharded_state_dict())
        if isinstance(tensor, ShardedTensor) and not any(_plain(tensor.replica_id))
    ]
    assert len(found) == len(set(found)), "a shard has two main replicas"
    return layers, set(found)


def _plain(replica_id: int | tuple[int, ...]) -> tuple[int, ...]:
    return replica_id if isinstance(replica_id, tuple) else (replica_id,)


@pytest.mark.usefixtures("a_training_loop")
def test_layers_and_checkpoint_keys() -> None:
    flags = MOCK + "--num-layers 8 "
    [(_, whole)] = run_ranks(1, shards, flags)
    (first, on_first), (second, on_second) = run_ranks(2, shards, flags + ZB_V)
    assert (first, second) == ([[1, 2], [7, 8]], [[3, 4], [5, 6]])
    assert not on_first & on_second
    assert on_first | on_second == whole


def layers_unpatched(flags: str) -> list[list[int]]:
    with without("placement.layers"):
        return shards(flags)[0]


@pytest.mark.usefixtures("a_training_loop")
def test_without_the_patch_stages_go_round() -> None:
    found = run_ranks(2, layers_unpatched, MOCK + "--num-layers 8 " + ZB_V)
    assert found == [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]


def tied_gradients(flags: str) -> list[float] | None:
    """Fill the gradients of both copies and finalize; return them, with and without the patch."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    module = import_module("megatron.core.distributed.finalize_model_grads")
    config, chunks = _build(flags)
    groups = (
        parallel_state.get_embedding_group(check_initialized=False),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    first, last = unwrap_model(chunks)
    if not first.pre_process:
        module._allreduce_word_embedding_grads(chunks, config, *groups)
        return None
    embedding, head = (
        chunk.shared_embedding_or_output_weight() for chunk in (first, last)
    )
    assert torch.equal(embedding, head)
    assert head.any()
    assert embedding.data_ptr() != head.data_ptr()
    embedding.main_grad.fill_(1.0)
    head.main_grad.fill_(2.0)
    with without("placement.tied_gradients"):
        module._allreduce_word_embedding_grads(chunks, config, *groups)
    found = [embedding.main_grad.max().item(), head.main_grad.max().item()]
    module._allreduce_word_embedding_grads(chunks, config, *groups)
    return [*found, embedding.main_grad.max().item(), head.main_grad.min().item()]


@pytest.mark.usefixtures("a_training_loop")
def test_copies_of_the_embedding_get_one_gradient() -> None:
    assert run_ranks(2, tied_gradients, MOCK + ZB_V) == [[1.0, 2.0, 3.0, 3.0], None]


def untied_gradients(flags: str) -> list[float] | None:
    from megatron.core.utils import unwrap_model

    from megatron_ext.runtime.folded import sum_tied_gradients

    _, chunks = _build(flags)
    first, last = unwrap_model(chunks)
    if not first.pre_process:
        return None
    weights = (first.embedding.word_embeddings.weight, last.output_layer.weight)
    assert not weights[0].equal(weights[1])
    for value, weight in enumerate(weights):
        weight.main_grad.fill_(value)
    sum_tied_gradients(chunks)
    return [weight.main_grad.max().item() for weight in weights]


@pytest.mark.usefixtures("a_training_loop")
def test_untied_weights_stay_apart() -> None:
    flags = MOCK + ZB_V + "--untie-embeddings-and-output-weights "
    assert run_ranks(2, untied_gradients, flags) == [[0.0, 1.0], None]


def shared() -> tuple[dict[str, float], list[float] | None]:
    """Share losses of the first rank, under any names, and what MTP tracked there."""
    import torch
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from torch import distributed

    from megatron_ext.runtime.folded import share_losses, share_mtp_losses
    from tests.pipelines import make_pipeline, use

    use(make_pipeline("zb-v", pp=2, num_microbatches=4))
    start_parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2
    )
    assert share_losses({}) == {}
    share_mtp_losses()
    tracker = MTPLossLoggingHelper.tracker
    if hasattr(MTPLossLoggingHelper, "save_loss_to_tracker"):
        save, others = MTPLossLoggingHelper.save_loss_to_tracker, []
        reduce, key = MTPLossLoggingHelper.reduce_loss_in_tracker, "values"
    else:  # from 0.19 on, which counts correct tokens, and all, beside the loss
        save, others = (
            MTPLossLoggingHelper.save_metrics_to_tracker,
            [torch.tensor(1.0)] * 2,
        )
        reduce, key = MTPLossLoggingHelper.reduce_metrics_in_tracker, "loss_values"
    assert key not in tracker
    own = {}
    if distributed.get_rank() == 0:
        own = {"lm loss": torch.tensor(1.5), "other": torch.tensor([2.0, 3.0])}
        save(torch.tensor(4.0), *others, 1, 2)
    losses = share_losses(own)
    share_mtp_losses()
    reduce()
    values = tracker[key].tolist()
    return {key: loss.sum().item() for key, loss in losses.items()}, values


def test_losses_reach_the_rank_that_logs() -> None:
    assert run_ranks(2, shared) == [({"lm loss": 1.5, "other": 5.0}, [0.0, 4.0])] * 2
