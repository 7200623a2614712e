"""Checkpoints with each patch and without: torch's Adam goes on from one, and enums load."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.patches.single import start_parallel, without
from tests.ranks import run_ranks

_BEFORE = "optimizer.state_before_first_step"
_LOAD = "optimizer.load_own_steps"
_STEP = "optimizer.step_of_reshardable"
_PADDING = "optimizer.padding_of_reshardable"
_FORMATS = ("dp_reshardable", "fully_reshardable")
_WIDTH = 8


class _Training:
    """Two fp32 layers under DDP and the distributed optimizer, with data by step number."""

    def __init__(self, *, tied: bool = False) -> None:
        import torch
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.module import MegatronModule

        config = TransformerConfig(
            num_layers=1, hidden_size=_WIDTH, num_attention_heads=1
        )
        torch.manual_seed(5)
        module = MegatronModule(config)
        module.first = torch.nn.Linear(_WIDTH, _WIDTH)
        module.second = torch.nn.Linear(_WIDTH, 1)
        # Gets a bucket of its own, between those of what comes before and after it.
        module.second.weight.shared_embedding = tied
        self.module = module
        self.model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(use_distributed_optimizer=True),
            module,
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=True),
            [self.model],
        )

    def train(self, first: int, last: int) -> list[float]:
        """Take steps `first` up to `last`, and return the loss of each."""
        return [self._step(number) for number in range(first, last)]

    def _step(self, number: int) -> float:
        import torch

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(number)
        batch = torch.randn(16, _WIDTH, generator=generator)
        hidden = torch.tanh(self.module.first(batch))
        loss = (self.module.second(hidden) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        return loss.item()

    def states(self, sharding: str, *, loading: bool) -> dict[str, Any]:
        """Return what is saved, or the template of what is loaded."""
        model = self.module.sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": sharding}
        optimizer = self.optimizer.sharded_state_dict(
            model, is_loading=loading, metadata=metadata
        )
        return {"model": model, "optimizer": optimizer}

    def load(self, directory: str, sharding: str) -> None:
        """Go on from a checkpoint."""
        from megatron.core import dist_checkpointing

        loaded = dist_checkpointing.load(self.states(sharding, loading=True), directory)
        self.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])


def resume(directory: str, sharding: str) -> None:
    from megatron.core import dist_checkpointing

    start_parallel()
    training = _Training()
    training.train(0, 3)
    dist_checkpointing.save(training.states(sharding, loading=False), directory)
    uninterrupted = training.train(3, 6)

    resumed = _Training()
    resumed.load(directory, sharding)
    steps = [state["step"] for state in resumed.optimizer.optimizer.state.values()]
    assert {float(step) for step in steps} == {3.0}
    assert len({id(step) for step in steps}) == len(steps)
    assert resumed.train(3, 6) == uninterrupted

    # Upstream without each of the patches.
    with without(_BEFORE), pytest.raises(AssertionError):
        _Training().load(directory, sharding)
    if sharding == "dp_reshardable":
        with without(_LOAD), pytest.raises(RuntimeError, match="leaf Variable"):
            _Training().load(directory, sharding)
        return
    with without(_STEP), pytest.raises(KeyError, match="step"):
        _Training().load(directory, sharding)
    with without(_LOAD):  # silently: one step tensor for all, incremented by each
        wrong = _Training()
        wrong.load(directory, sharding)
        assert wrong.train(3, 6) != uninterrupted


def resume_tied(directory: str) -> None:
    from megatron.core import dist_checkpointing

    start_parallel()
    training = _Training(tied=True)
    training.train(0, 3)
    dist_checkpointing.save(
        training.states("fully_reshardable", loading=False), f"{directory}/right"
    )
    with without(_PADDING):
        dist_checkpointing.save(
            training.states("fully_reshardable", loading=False), f"{directory}/wrong"
        )
    uninterrupted = training.train(3, 6)

    resumed = _Training(tied=True)
    resumed.load(f"{directory}/right", "fully_reshardable")
    assert resumed.train(3, 6) == uninterrupted
    resumed.load(f"{directory}/wrong", "fully_reshardable")
    assert resumed.train(3, 6) != uninterrupted


def test_resume_with_padded_buckets(tmp_path: Path) -> None:
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
    run_ranks(2, resume_tied, str(tmp_path))


@pytest.mark.parametrize("sharding", _FORMATS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_resume(tmp_path: Path, num_ranks: int, sharding: str) -> None:
    run_ranks(num_ranks, resume, str(tmp_path), sharding)


def queue_process(script: str, patched: bool) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    name = "get_write_results_queue"  # with an underscore before 0.19
    make_queue = getattr(filesystem_async, name, None) or getattr(
        filesystem_async, f"_{name}"
    )
    main = ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    if patched:
        queue = make_queue()
        queue.put("written")
        assert queue.get() == "written"
        assert main.__file__ == script
    else:
        with without("dist_checkpointing.queue_process"), pytest.raises(EOFError):
            make_queue()


@pytest.mark.parametrize("patched", [True, False])
def test_the_queue_does_without_the_script(tmp_path: Path, patched: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise ImportError('this needs python -m megatron_ext')\n")
    run_ranks(1, queue_process, str(script), patched)


def common_state(directory: str, patched: bool) -> None:
    """Save and load arguments with an enum, as a Python does that pickles enums as `getattr`."""
    import enum
    import pickle
    from argparse import Namespace

    from megatron.core.dist_checkpointing.strategies import common
    from megatron.core.transformer.enums import AttnBackend

    def by_name(member: enum.Enum, _protocol: int) -> object:
        return getattr, (type(member), member.name)

    start_parallel()
    enum.Enum.__reduce_ex__ = AttnBackend.__reduce_ex__ = by_name  # type: ignore[assignment]
    state, path = (
        {"args": Namespace(attention_backend=AttnBackend.flash)},
        Path(directory),
    )
    if hasattr(common, "save_common"):  # from 0.17 on
        save, load = common.save_common, common.load_common
    else:
        save = common.TorchCommonSaveStrategy("torch", 1).save_common
        load = common.TorchCommonLoadStrategy().load_common
    if patched:
        save(state, path)
        assert load(path)["args"].attention_backend is AttnBackend.flash
        assert pickle.dumps(AttnBackend.flash).count(
            b"getattr"
        )  # only Megatron's file changed
    else:
        with without("dist_checkpointing.enums_by_value"):
            save(state, path)
        with pytest.raises(pickle.UnpicklingError, match="getattr"):
            load(path)


@pytest.mark.parametrize("patched", [True, False])
def test_enums_are_written_by_value(tmp_path: Path, patched: bool) -> None:
    run_ranks(1, common_state, str(tmp_path), patched)
