"""The cost of the patch points in a training step without an active feature.

    python benchmarks/step_overhead.py [--pairs N] [--json FILE]

Two processes train a small GPT on the CPU as a pipeline of two stages. From step to step they
alternate between two forms of the same patches: patch points (wrapt, which select their chain at
each call) and plain Python functions of the same effect, like a hand-written monkey patch. Reported
are the median ratio of neighbouring steps, and the number of calls through patch points in a step.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.json_output import add_json, write_json

os.environ.setdefault("MEGATRON_EXT_DEVICE", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import megatron_ext  # noqa: F401  (arms the patches before Megatron is imported)
from megatron_ext.patches.point import PatchPoint, Site, replace_aliases
from megatron_ext.patches.registry import REGISTRY

_STAGES, _MICROBATCHES = 2, 4
_SEQ_LENGTH, _VOCAB, _HIDDEN, _LAYERS = 64, 512, 64, 4


def _plain(site: Site) -> Any:
    """Return a function that does what a site's active patches do, without proxy or dispatch."""
    active = [patch for patch in site.patches if patch.when()]
    function = getattr(site.own, "__func__", site.own)
    if not active:
        return site.own
    is_method = isinstance(site.parent, type) and not isinstance(site.own, staticmethod)

    @functools.wraps(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        instance, call = None, function
        if is_method:
            instance, *args = args
            call = functools.partial(function, instance)
        for patch in reversed(active):
            call = functools.partial(_call, patch.fn, call, instance)
        return call(*args, **kwargs)

    return staticmethod(redirected) if isinstance(site.own, staticmethod) else redirected


def _call(
    fn: Callable[..., Any], call: Callable[..., Any], instance: Any, *args: Any, **kwargs: Any
) -> Any:
    return fn(call, instance, args, kwargs)


@contextmanager
def plain_redirects() -> Iterator[None]:
    """Run a block with every patch point replaced by a plain function."""
    sites = [site for site in REGISTRY.sites() if isinstance(site.installed, PatchPoint)]
    plain = [_plain(site) for site in sites]
    points = [site.installed for site in sites]
    for site, function in zip(sites, plain, strict=True):
        setattr(site.parent, site.attribute, function)
    replace_aliases(zip(points, plain, strict=True))
    try:
        yield
    finally:
        for site, point in zip(sites, points, strict=True):
            setattr(site.parent, site.attribute, point)
        replace_aliases(
            (f, p) for f, p in zip(plain, points, strict=True) if callable(f) and f is not p
        )


def make_step() -> Callable[[], None]:
    """Return a function that runs one whole training step of a small GPT."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=_STAGES)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=_LAYERS,
        hidden_size=_HIDDEN,
        num_attention_heads=4,
        pipeline_model_parallel_size=_STAGES,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=False,  # the path whose sends go through a patch point
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=_VOCAB,
        max_sequence_length=_SEQ_LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-4), [model])
    tokens = torch.randint(0, _VOCAB, (1, _SEQ_LENGTH + 1))
    positions = torch.arange(_SEQ_LENGTH).unsqueeze(0)

    def forward_step(_iterator: Any, chunk: Any) -> tuple[Any, Callable[..., Any]]:
        output = chunk(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        return output, lambda loss: (loss.mean(), {"lm loss": loss.mean().detach()})

    def step() -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        schedules.get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=[model],
            num_microbatches=_MICROBATCHES,
            seq_length=_SEQ_LENGTH,
            micro_batch_size=1,
        )
        optimizer.step()

    return step


def count_calls(step: Callable[[], None]) -> int:
    """Return how many calls go through patch points in one step of this rank."""
    count = 0
    dispatch = REGISTRY._dispatch

    def counting(*args: Any) -> Any:
        nonlocal count
        count += 1
        return dispatch(*args)

    REGISTRY.deactivate()
    REGISTRY._dispatch = counting  # type: ignore[method-assign]
    REGISTRY.activate()
    step()
    REGISTRY.deactivate()
    del REGISTRY._dispatch  # type: ignore[method-assign]
    REGISTRY.activate()
    return count


def measure(rank: int, pairs: int, folder: str) -> None:
    """Train on one rank, alternating; the last rank writes the figures to `folder`."""
    import torch

    store = torch.distributed.FileStore(f"{folder}/store", _STAGES)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=_STAGES)
    step = make_step()
    calls = count_calls(step)
    for _ in range(10):
        step()
    ratios, plain_s = [], []
    for index in range(pairs):
        # The order within a pair alternates too: a drift of the machine cancels.
        seconds = {}
        for state in (("points", "plain"), ("plain", "points"))[index % 2]:
            with plain_redirects() if state == "plain" else nullcontext():
                torch.distributed.barrier()
                begin_s = time.perf_counter()
                step()
                seconds[state] = time.perf_counter() - begin_s
        ratios.append(seconds["points"] / seconds["plain"])
        plain_s.append(seconds["plain"])
    if rank == _STAGES - 1:
        figures = {
            "pairs": pairs,
            "patch_point_calls_per_step": calls,
            "median_plain_step_s": statistics.median(plain_s),
            "median_ratio": statistics.median(ratios),
            "quartiles": statistics.quantiles(ratios, n=4),
        }
        Path(folder, "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    torch.distributed.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200, help="pairs of steps to compare")
    add_json(parser)
    args = parser.parse_args()

    from torch import multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(measure, (args.pairs, folder), nprocs=_STAGES)
        figures = json.loads(Path(folder, "figures.json").read_text())
    low, _, high = figures["quartiles"]
    print(
        f"step with plain functions: {1e3 * figures['median_plain_step_s']:.1f} ms (median of "
        f"{args.pairs}), {figures['patch_point_calls_per_step']} calls through patch points\n"
        f"patch points / plain functions: {figures['median_ratio']:.4f} "
        f"(quartiles {low:.4f} to {high:.4f}); bar: 1.01"
    )
    if args.json:
        write_json(args.json, figures)


if __name__ == "__main__":
    main()
