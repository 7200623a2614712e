"""Trains a small model, capturing every loss, gradient and parameter for bitwise comparison.

Weights are drawn by name, so they do not depend on which rank builds which layer.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import re
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.ranks import require_training, run_ranks, train_here
from tests.training.helpers import MOCK, NO_DROPOUT, fix_vocabulary_order

GPT = MOCK + NO_DROPOUT + "--eval-iters 0 --train-iters 3 "
PP2 = "--pipeline-model-parallel-size 2 "
PP4 = "--pipeline-model-parallel-size 4 "


@dataclass
class Captured:
    """Results of one rank, or of all ranks combined."""

    losses: list[dict[str, float]] = field(default_factory=list)
    """By step, on the ranks that have the loss."""
    gradients: list[dict[str, str]] = field(default_factory=list)
    """By step: parameter name to the digest of its reduced gradient."""
    parameters: dict[str, str] = field(default_factory=dict)
    """After the last step: parameter name to digest."""
    tables: list[str] = field(default_factory=list)
    """Labels of the tables that the executor ran, in the order of first use."""
    transports: list[str] = field(default_factory=list)
    """Class names of the transports that were opened."""
    orders: list[str] = field(default_factory=list)
    """Origins of the orders of steps, without duplicates: "table", or a policy's name."""
    pairs: int = 0
    """Number of forwards and backwards that ran as pairs."""


def train(
    num_ranks: int,
    flags: str,
    *,
    model: str = "gpt",
    timeout_s: float = 120,
    mean_delay_s: float = 0.0,
    device: str = "cpu",
    env: Mapping[str, str] | None = None,
    run: Callable[..., Captured] | None = None,
) -> Captured:
    """Train on `num_ranks` ranks, with `run` or `run_here`, and combine their results.

    Replicas of a parameter must agree. With a delay, actions in our schedules take random times.
    """
    require_training(f"pretrain_{model}.py")
    by_rank = run_ranks(
        num_ranks,
        run or run_here,
        model,
        flags.split(),
        mean_delay_s,
        timeout_s=timeout_s,
        device=device,
        env=env,
    )
    together = Captured(gradients=[{} for _ in by_rank[0].gradients])
    for rank, captured in enumerate(by_rank):
        together.losses = captured.losses if any(captured.losses) else together.losses
        together.tables, together.transports = captured.tables, captured.transports
        together.orders = together.orders if rank else captured.orders
        together.pairs += captured.pairs
        for gradients, gradients_of_rank in zip(
            together.gradients, captured.gradients, strict=True
        ):
            _merge(gradients, gradients_of_rank, rank)
        _merge(together.parameters, captured.parameters, rank)
    assert together.losses, "no rank has a loss"
    return together


def _merge(digests: dict[str, str], digests_of_rank: dict[str, str], rank: int) -> None:
    for name, digest in digests_of_rank.items():
        assert digests.setdefault(name, digest) == digest, (
            f"rank {rank} has another {name}"
        )


def run_here(model: str, argv: list[str], mean_delay_s: float = 0.0) -> Captured:
    """Train as one rank."""
    from megatron_ext.runtime import megatron_messages, runtime

    fix_vocabulary_order()
    captured = (
        Captured()
    )  # replacements below are never undone: this process is a rank and ends
    make_table = runtime.make_table

    def told(*args: Any, **kwargs: Any) -> Any:
        table = make_table(*args, **kwargs)
        captured.tables.append(table.schedule.label)
        return table

    open_transport = runtime.open_transport

    def opened(*args: Any, **kwargs: Any) -> Any:
        transport = open_transport(*args, **kwargs)
        captured.transports.append(type(transport).__name__)
        return transport

    runtime.make_table, runtime.open_transport = told, opened
    runtime.Executor = _telling(runtime.Executor, captured, mean_delay_s)  # type: ignore[misc]
    megatron_messages.open_transport = opened
    _capture_loop(captured)
    try:
        train_here(model, argv)
    except SystemExit as ended:  # upstream's loop ends this way with --exit-interval
        if ended.code:
            raise
    return captured


def _telling(base: Any, captured: Captured, mean_delay_s: float) -> Any:
    from megatron_ext.config import active
    from megatron_ext.runtime.ordering import PolicyOrder
    from megatron_ext.schedules.search.policies import Hint

    draw = random.Random(os.environ["RANK"])

    class TellingExecutor(base):
        def run(self) -> None:
            order = "table"
            if isinstance(self.order, PolicyOrder):
                pipeline = active.pipeline()
                assert pipeline is not None
                assert pipeline.dynamic is not None
                order = pipeline.dynamic.policy
                assert isinstance(self.order.policy, Hint) == (order == "hint")
            if order not in captured.orders:
                captured.orders.append(order)
            run_action = self.compute.run

            def late(*args: Any, **kwargs: Any) -> Any:
                if mean_delay_s:
                    time.sleep(draw.expovariate(1 / mean_delay_s))
                return run_action(*args, **kwargs)

            self.compute.run = late
            run_pair = self.compute.run_pair

            def counted(*args: Any) -> Any:
                captured.pairs += 1
                return run_pair(*args)

            self.compute.run_pair = counted
            super().run()

    return TellingExecutor


def _capture_loop(captured: Captured) -> None:
    """Make `megatron.training` record what it computes."""
    from megatron_ext import devices

    devices.current()  # before Megatron is imported
    from megatron.training import get_args, training

    set_up = training.setup_model_and_optimizer

    @functools.wraps(set_up)
    def capturing(*args: Any, **kwargs: Any) -> Any:
        chunks, optimizer, scheduler = set_up(*args, **kwargs)
        if not get_args().load:
            _fill_by_name(chunks, optimizer)
        # Wrap only now, when this job's patches are in place, so that patches of a step run inside.
        training.train_step = _capturing_step(
            training.train_step, captured, chunks, optimizer
        )
        train = training.train

        @functools.wraps(train)
        def training_then_digesting(*args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            finally:
                captured.parameters.update(
                    {name: _digest(p) for name, p in named_weights(chunks)}
                )

        training.train = training_then_digesting
        return chunks, optimizer, scheduler

    training.setup_model_and_optimizer = capturing


def _capturing_step(
    base: Any, captured: Captured, chunks: list[Any], optimizer: Any
) -> Any:
    from megatron.training import get_args

    @functools.wraps(base)
    def capturing(*args: Any, **kwargs: Any) -> Any:
        step = optimizer.step

        def stepping() -> Any:
            captured.gradients.append(_gradients(chunks, get_args()))
            return step()

        optimizer.step = stepping
        losses, *skipped_and_norms = base(*args, **kwargs)
        optimizer.step = step
        captured.losses.append({key: loss.item() for key, loss in losses.items()})
        return losses, *skipped_and_norms

    return capturing


def _gradients(chunks: list[Any], args: Any) -> dict[str, str]:
    """Return digests by name; empty with the distributed optimizer, which shards gradients."""
    shards = args.use_distributed_optimizer
    return {
        name: _digest(p.main_grad) for name, p in named_weights(chunks) if not shards
    }


def named_weights(chunks: list[Any]) -> list[tuple[str, Any]]:
    """Return parameters under names that do not depend on the rank that holds them."""
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    named = []
    for chunk in chunks:
        module = unwrap_model(chunk)
        for name, parameter in module.named_parameters():
            path = re.match(r"((?:decoder|encoder)\.layers)\.(\d+)\.(.*)", name)
            if path:
                layer = module.get_submodule(f"{path[1]}.{path[2]}")
                name = f"{path[1]}.{layer.layer_number - 1}.{path[3]}"
            if getattr(parameter, "tensor_model_parallel", False):
                name += f"@tp{tp_rank}"
            if not getattr(parameter, "allreduce", True):
                name += f"@ep{ep_rank}"
            named.append((name, parameter))
    return named


def _fill_by_name(chunks: list[Any], optimizer: Any) -> None:
    import torch
    from megatron.core.utils import unwrap_model

    tied = unwrap_model(chunks[0]).share_embeddings_and_output_weights
    with torch.no_grad():
        for name, parameter in named_weights(chunks):
            if name.endswith(".bias") or "layernorm" in name:
                continue
            drawn = name
            if tied:
                drawn = name.replace(
                    "output_layer.weight", "embedding.word_embeddings.weight"
                )
            generator = torch.Generator().manual_seed(zlib.crc32(drawn.encode()))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    optimizer.reload_model_params()


def _digest(tensor: Any) -> str:
    import torch

    raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]
