"""Replicas that share out their micro-batches: the sum of all, whoever runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from io import BytesIO
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from megatron_ext.config.pipeline_config import DynamicOrder
from megatron_ext.errors import ScheduleError, TransportError
from megatron_ext.features.lengths.balanced_step import BalancedStep
from megatron_ext.features.lengths.length_balance import best_order, deal_out, fills_of
from megatron_ext.features.lengths.replica_exchange import (
    ReplicaExchange,
    _packed,
    _placed,
)
from megatron_ext.runtime.lengths import cost_of_model
from megatron_ext.schedules import Placement, generate
from megatron_ext.schedules.table.length_cost import LengthCost
from tests.pipelines import make_pipeline, use
from tests.ranks import run_ranks
from tests.runtime import toy

if TYPE_CHECKING:
    from megatron_ext.config.active import Pipeline

LENGTHS = (40, 3, 25, 3, 40, 7, 12, 5, 31, 1, 2, 6, 38, 4, 9, 8)
"""Of the file: replica 0 reads every other one, from the first, and has all the long ones."""
REPLICAS = 2
M = len(LENGTHS) // REPLICAS
READ = [list(range(first, len(LENGTHS), REPLICAS)) for first in range(REPLICAS)]
MEASURED = LengthCost(0.0, 1.0)
MIRRORED = "bitpipe", "dualpipe"
"""Schedules whose two pipelines are replicas to Megatron."""
Item = dict[str, torch.Tensor]
SETTINGS = toy.VARYING


def _item(number: int) -> Item:
    generator = torch.Generator().manual_seed(number)
    hidden = torch.randn((LENGTHS[number], 1, toy.WIDTH), generator=generator)
    tokens = torch.full((1, LENGTHS[number]), number)
    return {"hidden": hidden, "tokens": tokens}


def _file(replica: int) -> Iterator[Item]:
    """Yield what a replica reads in a training step and in the evaluation after it."""
    for _ in range(2):
        yield from map(_item, READ[replica])


def _forward_step(
    data: Iterator[Item] | None, model: toy.Stage
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
    """Take data on the first stage and on the last, as GPT does, and write into what was taken."""
    item = {} if data is None else next(data)
    output = model(item.get("hidden"))
    tokens = item.get("tokens")
    item["tokens"] = None  # type: ignore[assignment]

    def loss(output: torch.Tensor) -> Any:
        assert tokens is not None
        assert len(output) == tokens.shape[-1], "the labels of another micro-batch"
        found = output.square().sum()
        return found, (int(tokens[0, 0]), found.item())

    return output, loss


def _train(schedule: str, hosted_pp: int, options: dict[str, Any]) -> Any:
    """Return replica, gradients, and reports in training and evaluation on this rank."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    pp = hosted_pp * (REPLICAS if schedule in MIRRORED else 1)
    pipeline = make_pipeline(schedule, pp, M, **options)
    placement = pipeline.placement
    num_chunks = placement.num_stages // hosted_pp
    toy.start(hosted_pp, num_chunks if num_chunks > 1 else None)
    use(pipeline)
    stages = list(
        placement.stages_of[parallel_state.get_pipeline_model_parallel_rank()]
    )
    model = toy.chunks(toy.config(**SETTINGS), stages)
    ends = (0, placement.num_stages - 1)
    replica = parallel_state.get_data_parallel_rank()
    iterators = [_file(replica) if stage in ends else None for stage in stages]

    def step(*, forward_only: bool) -> list[Any]:
        found: list[Any] = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iterators,
            model=model,
            num_microbatches=M,
            seq_length=max(LENGTHS),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return found

    reports = step(forward_only=False)
    gradients = {chunk.number: chunk.weight.grad for chunk in model}
    with torch.no_grad():
        evaluated = step(forward_only=True)
    return replica, gradients, reports, evaluated


def _one_process(
    num_stages: int, order: list[int]
) -> tuple[list[torch.Tensor], dict[int, float]]:
    """Sum the gradients of micro-batches in an order, without a pipeline."""
    model = [toy.Stage(None, stage, None) for stage in range(num_stages)]
    losses = {}
    for number in order:
        x = _item(number)["hidden"]
        for stage in model:
            x = stage(x)
        loss = x.square().sum()
        (loss / M).backward()
        losses[number] = loss.item()
    return [stage.weight.grad for stage in model], losses  # type: ignore[misc]


def _orders(pipeline: Pipeline) -> list[list[int]]:
    """Return the micro-batches of each replica in the order in which it runs them."""
    return _orders_by(pipeline, pipeline.config.length_costs or _cost_of_toy())


def _cost_of_toy() -> LengthCost:
    return cost_of_model(toy.config(**SETTINGS))


def _orders_by(pipeline: Pipeline, cost: LengthCost) -> list[list[int]]:
    costs = [cost.of_length(length) for length in LENGTHS]
    schedule = pipeline.full
    shares = READ
    if pipeline.config.balance == "pack":
        shares = deal_out(costs, REPLICAS, fills_of(schedule.placement))
        assert shares != READ, "no test if the file's shares are best"
    found = []
    for share in shares:
        order = best_order(schedule, [costs[number] for number in share])
        found.append([share[place] for place in order])
    return found


def _runs(placement: Placement, replica: int, stage: int) -> int:
    """Return the replica whose micro-batches a stage runs."""
    return 1 - replica if placement.is_crossed(stage) else replica


@pytest.mark.parametrize(
    ("balance", "schedule", "options"),
    [
        pytest.param("pack", "1f1b", {}, id="pack-1f1b"),
        pytest.param(
            "pack",
            "interleaved",
            {"chunks": 2, "transport": "shm"},
            id="pack-interleaved-shm",
        ),
        pytest.param("pack", "zb-v", {}, id="pack-zb-v"),
        pytest.param(
            "pack",
            "interleaved",
            {"chunks": 2, "dynamic": DynamicOrder()},
            id="pack-dynamic",
        ),
        pytest.param("pack", "1f1b", {"length_costs": MEASURED}, id="pack-measured"),
        pytest.param("pack", "bitpipe", {}, id="pack-bitpipe"),
        pytest.param("pack", "dualpipe", {}, id="pack-dualpipe"),
        pytest.param("order", "bitpipe", {}, id="order-bitpipe"),
        pytest.param(
            "order",
            "bitpipe",
            {"options": {"routing": "local"}},
            id="order-bitpipe-local",
        ),
        pytest.param(
            "order",
            "bitpipe",
            {"options": {"order": "paper"}},
            id="order-bitpipe-paper",
        ),
        pytest.param(
            "order", "bitpipe", {"dynamic": DynamicOrder()}, id="order-bitpipe-dynamic"
        ),
        pytest.param("order", "dualpipe", {}, id="order-dualpipe"),
    ],
)
def test_the_gradient_is_the_same_sum(
    balance: str, schedule: str, options: dict[str, Any]
) -> None:
    pp, ranks = 2, 2 * REPLICAS
    options = {"balance": balance, **options}
    pipeline = make_pipeline(
        schedule, ranks if schedule in MIRRORED else pp, M, **options
    )
    placement = pipeline.placement
    orders = _orders(pipeline)
    assert orders != READ, "no test if the order of the file is best"
    if pipeline.config.length_costs is not None:
        assert orders != _orders_by(pipeline, _cost_of_toy()), (
            "no test if both are the same"
        )
    expected = [_one_process(placement.num_stages, order) for order in orders]
    by_rank = run_ranks(ranks, _train, schedule, pp, options)
    seen = set()
    for replica, gradients, reports, evaluated in by_rank:
        for stage, gradient in gradients.items():
            alone, _ = expected[_runs(placement, replica, stage)]
            assert torch.equal(gradient, alone[stage]), (replica, stage)
            seen.add((replica, stage))
        if reports:
            losses = expected[replica][1]
            assert reports == sorted(losses.items()), "in the order of the file"
            assert [number for number, _ in evaluated] == READ[replica], (
                "evaluation stays"
            )
    assert len(seen) == REPLICAS * placement.num_stages
    off = [_one_process(placement.num_stages, order)[0] for order in READ]
    for stage in range(placement.num_stages):
        torch.testing.assert_close(
            sum(gradients[stage] for gradients, _ in expected),
            sum(gradients[stage] for gradients in off),
        )


def _step_of_replicas(num_items: tuple[int, ...]) -> Any:
    """Read one step in two chunks; return what this replica runs, or the error."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    schedule = generate("1f1b", 2, M)
    costs = make_pipeline("1f1b", 2, M).costs
    replicas = ReplicaExchange(group, torch.device("cpu"))
    step = BalancedStep(schedule, costs, LengthCost(1.0, 0.1), replicas)

    def read() -> Iterator[Item]:
        return iter(list(_file(dist.get_rank()))[: num_items[dist.get_rank()]])

    chunks = [step.iterator(read()), step.iterator(read())]
    try:
        taken = [
            [int(item["tokens"][0, 0]) for item in chunk] for chunk in chunks if chunk
        ]
    except ScheduleError as error:
        return str(error)
    assert taken[0] == taken[1] == list(step.order or ())
    return taken[0]


def test_a_replica_without_data_ends_all() -> None:
    fed, starved = run_ranks(2, _step_of_replicas, (M, 3))
    assert fed == (
        "--pipeline-balance pack: data-parallel rank 1 could not read this step's "
        "micro-batches; see that rank's error"
    )
    assert starved.startswith(
        f"the data ended after 3 of {M} micro-batches of a step; train"
    )


def _ask_one_that_left() -> str:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(TransportError) as raised:
        ReplicaExchange(group, torch.device("cpu")).costs([1.0])
    return str(raised.value)


def test_a_replica_that_left_is_told() -> None:
    said, _ = run_ranks(2, _ask_one_that_left)
    assert said.startswith(
        "--pipeline-balance pack: ranks 0, 1 could not exchange the costs of their micro-batches: "
    )
    assert len(said.splitlines()) == 1


def test_all_chunks_of_a_rank_read_the_same() -> None:
    taken = run_ranks(2, _step_of_replicas, (M, M))
    assert sorted(taken[0] + taken[1]) == list(range(len(LENGTHS)))
    longest = [sum(LENGTHS[number] > 20 for number in share) for share in taken]
    assert sorted(longest) == [2, 3], "the five long ones are shared out"


def test_what_would_have_to_be_unpickled_is_not_sent() -> None:
    plain = {
        0: {"tokens": torch.arange(3), "lengths": [1, 2.0, "x", None], "at": (True,)}
    }
    assert str(torch.load(BytesIO(_packed(plain)), weights_only=True)) == str(plain)
    with pytest.raises(
        ScheduleError, match=r"a micro-batch contains fractions\.Fraction, but"
    ):
        _packed({0: Fraction(1, 2)})


def test_tensors_arrive_where_the_sender_had_them() -> None:
    device = torch.device("meta")
    storage = SimpleNamespace(to=lambda device: ("moved to", device))
    assert _placed(device, storage, "cpu") is storage
    assert _placed(device, storage, "cuda:1") == ("moved to", device)
