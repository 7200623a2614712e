"""Random numbers of a micro-batch are the same under every schedule, and after a resume."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.config import active
from megatron_ext.config.active import clear_configuration
from megatron_ext.errors import ScheduleError
from megatron_ext.runtime.compute import microbatch_rng, rng_of_this_step
from tests.pipelines import use
from tests.ranks import run_ranks
from tests.training.helpers import LLAMA, MOCK, MOE

from .capture import PP2, run_here, train
from .test_equality import EP2, PAIRS, TP2, VPP2, assert_equal, stock

DROPOUT = (
    MOCK
    + "--eval-iters 1 --eval-interval 2 --train-iters 3 --clip-grad 0 --microbatch-rng "
)
RECOMPUTE = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
)
TRACKED = (
    "data-parallel-rng",
    "model-parallel-rng",
    "expert-parallel-rng",
    "mtp-hsm-rng",
)


def _draw() -> dict[str, list[float]]:
    """Draw from every generator that Megatron has."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    drawn = {
        "default": torch.rand(2).tolist(),
        "random": [random.random(), random.gauss(0, 1)],
        "numpy": np.random.standard_normal(3).tolist(),
    }
    for name in TRACKED:
        with get_cuda_rng_tracker().fork(name):
            drawn[name] = torch.rand(2).tolist()
    return drawn


def _states() -> dict[str, list[int]]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = {"default": torch.get_rng_state(), **get_cuda_rng_tracker().get_states()}
    numpys = np.random.get_state(legacy=False)["state"]
    return {
        **{name: state.tolist() for name, state in states.items()},
        "numpy": [*numpys["key"].tolist(), numpys["pos"]],
        "random": [*random.getstate()[1]],
    }


def _drawn() -> list[dict[str, list[float]]]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import (
        get_cuda_rng_tracker,
        model_parallel_cuda_manual_seed,
    )

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model_parallel_cuda_manual_seed(3)
    get_cuda_rng_tracker().add("mtp-hsm-rng", 5)  # as Hidden State Mixing of 0.20 does
    before = _states()
    use(None, seed=1)
    with microbatch_rng(4, 1, 2):
        first, second = _draw(), _draw()
    with microbatch_rng(4, 2, 1):
        other = _draw()
    with microbatch_rng(4, 1, 2):
        again = _draw()
    assert _states() == before
    return [first, second, other, again]


def test_each_generator_starts_anew_for_each_micro_batch_and_goes_on_afterwards() -> (
    None
):
    ranks = run_ranks(2, _drawn)
    for first, second, other, again in ranks:
        assert first == again
        for name in first:
            assert first[name] != second[name]
            assert first[name] != other[name]
        assert len({tuple(values) for values in first.values()}) == len(first)
    mine, theirs = (rank[0] for rank in ranks)
    same = {name for name in mine if mine[name] == theirs[name]}
    expected = {"default", "data-parallel-rng", "mtp-hsm-rng", "numpy", "random"}
    assert same - {"expert-parallel-rng"} == expected, "as between upstream's ranks"


def _drawn_by_replica() -> list[dict[str, list[float]]]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import (
        get_cuda_rng_tracker,
        model_parallel_cuda_manual_seed,
    )

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(3)
    get_cuda_rng_tracker().add("mtp-hsm-rng", 5)
    drawn = []
    for replicas_differ in (False, True):
        use(None, seed=1, replicas_differ=replicas_differ)
        with microbatch_rng(4, 1, 2):
            drawn.append(_draw())
    return drawn


def test_replicas_draw_their_own_numbers_only_on_request() -> None:
    mine, theirs = run_ranks(2, _drawn_by_replica)
    same, own = (
        {name for name in ours if ours[name] == others[name]}
        for ours, others in zip(mine, theirs, strict=True)
    )
    assert same == set(mine[0]) - {"mtp-hsm-rng"}, "without the flag"
    assert not own, "with the flag"


def test_a_step_that_nobody_counts_is_an_error() -> None:
    try:
        with rng_of_this_step(0, 0):
            pass  # off: no iteration is needed
        with pytest.raises(ScheduleError, match="need a seed; add --microbatch-rng"):
            active.seed_of(1)
        use(None, seed=5)
        with (
            pytest.raises(ScheduleError, match="the iteration is not known"),
            rng_of_this_step(0, 0),
        ):
            pass
        with torch.no_grad(), rng_of_this_step(0, 0):
            pass  # evaluation
        assert active.seed_of(1, "a") != active.seed_of(1, "b")
        here = active.seed_of(1)
        use(None, seed=6)
        assert active.seed_of(1) != here
    finally:
        clear_configuration()


@pytest.mark.short_s(4)
@pytest.mark.parametrize(
    ("schedule", "num_ranks", "flags", "theirs"),
    [
        pytest.param("zb-h1", 4, TP2 + RECOMPUTE, "", id="tp2-recompute"),
        pytest.param("zb-v", 2, LLAMA + MOE, VPP2, id="v-placement-moe"),
        pytest.param(
            f"zb-v {PAIRS}",
            4,
            f"{LLAMA}{MOE}{EP2}{TP2}--expert-tensor-parallel-size 1 ",
            VPP2,
            id="pairs-sequence-parallel",
        ),
    ],
)
def test_with_dropout_all_schedules_agree(
    schedule: str, num_ranks: int, flags: str, theirs: str
) -> None:
    """Where both have the same stages; Megatron's own schedule among them."""
    flags = DROPOUT + PP2 + flags
    found = train(num_ranks, f"{flags}--pipeline-schedule {schedule} ")
    assert schedule.startswith(found.tables[0].split()[0])
    assert bool(found.pairs) == (PAIRS in schedule)
    assert_equal(found, stock(num_ranks, flags + theirs))


def test_a_resumed_run_draws_what_the_whole_run_drew(tmp_path: Path) -> None:
    """Under Megatron's schedule first, then under ours, whose ranks loaded no generators."""
    flags = DROPOUT + PP2 + "--dist-ckpt-optim-fully-reshardable "
    saving = f"--save {tmp_path} --save-interval 2 --exit-interval 2 "
    train(2, flags + saving)
    rest = train(2, f"{flags}--pipeline-schedule 1f1b --load {tmp_path} --no-load-rng ")
    whole = stock(2, flags)
    assert rest.losses == whole.losses[2:]
    assert rest.parameters == whole.parameters


@pytest.mark.slow
@pytest.mark.usefixtures("emulated_musa")
def test_generators_of_a_device_start_anew_too() -> None:
    """Ranks that choose their order, against Megatron's own schedule, on the emulated device."""
    flags = MOCK + "--eval-iters 0 --train-iters 2 --clip-grad 0 " + PP2
    ours, theirs = (
        run_ranks(2, run_here, "gpt", (flags + more).split(), device="musa")
        for more in ("--pipeline-schedule 1f1b --use-dpp", "--microbatch-rng")
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.orders == ["hint"]
        assert mine.losses == other.losses
        assert mine.parameters == other.parameters
    assert len(ours[-1].losses) == 2
