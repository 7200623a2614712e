"""The keywords of Megatron's schedules do what they do there, and failures name their cause."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_ext
from megatron_ext.config.pipeline_config import DynamicOrder
from megatron_ext.errors import ScheduleError, TransportError
from megatron_ext.runtime import entry
from tests.pipelines import make_pipeline, use
from tests.ranks import run_ranks, start_ranks

from . import toy

M = toy.M


def _own_and_stock(
    changes: dict[str, Any], keywords: dict[str, Any]
) -> tuple[Any, Any]:
    """Reports and gradients of one step with Megatron's schedule and with ours."""
    toy.start(2)
    found = []
    for chosen in (None, make_pipeline("1f1b", 2, M)):
        use(chosen)
        config = toy.config(**changes)
        finalized: list[Any] = []

        def finalize(*args: Any, into: list[Any] = finalized, **named: Any) -> None:
            into.append((args[1], named["force_all_reduce"]))

        config.finalize_model_grads_func = finalize
        model = toy.chunks(config, [dist.get_rank()])
        reports = toy.step(config, model, **keywords)
        found.append((reports, finalized, model[0].firsts, model[0].weight.grad))
    return found[0], found[1]


def _to_real_shapes(received: Any, sent: Any) -> Any:
    """Stands for an `adjust_tensor_shapes_fn`, in a step with a wrong length."""
    assert received == sent == [(_WRONG_LENGTH, toy.BATCH, toy.WIDTH)]
    right = [(toy.LENGTH, toy.BATCH, toy.WIDTH)]
    return right, right


_WRONG_LENGTH = toy.LENGTH + 7


@pytest.mark.parametrize(
    ("changes", "keywords"),
    [
        pytest.param({}, {}, id="plain"),
        pytest.param({}, {"forward_only": True}, id="forward-only"),
        pytest.param(
            {},
            {"forward_only": True, "collect_non_loss_data": True},
            id="non-loss-data",
        ),
        pytest.param(
            {}, {"forward_only": True, "first_val_step": True}, id="first-validation"
        ),
        pytest.param(
            {}, {"forward_only": True, "first_val_step": False}, id="later-validation"
        ),
        pytest.param({"calculate_per_token_loss": True}, {}, id="per-token-loss"),
        pytest.param({}, {"force_all_reduce": True}, id="force-all-reduce"),
        pytest.param(
            toy.VARYING,
            {},
            id="shapes-travel",
        ),
        pytest.param({"deallocate_pipeline_outputs": False}, {}, id="outputs-kept"),
        pytest.param(
            {},
            {"seq_length": _WRONG_LENGTH, "decoder_seq_length": toy.LENGTH},
            id="decoder-length",
        ),
        pytest.param(
            {},
            {"seq_length": _WRONG_LENGTH, "adjust_tensor_shapes_fn": _to_real_shapes},
            id="adjusted-shapes",
        ),
    ],
)
def test_keywords_as_upstream(
    changes: dict[str, Any], keywords: dict[str, Any]
) -> None:
    for stock, own in run_ranks(2, _own_and_stock, changes, keywords):
        assert _plain(own[:3]) == _plain(stock[:3])
        assert (own[3] is None) == (stock[3] is None)
        if own[3] is not None:
            assert torch.equal(own[3], stock[3])


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return (
        [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
    )


def _given_groups() -> tuple[Any, Any]:
    """A pipeline over groups that Megatron's own state knows nothing of."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from megatron_ext.upstream.signatures import default_groups

    toy.start(1)
    chosen = make_pipeline("1f1b", 2, M)
    groups = default_groups()
    groups.pp = dist.group.WORLD
    found = []
    for run in (schedules.forward_backward_pipelining_without_interleaving, None):
        use(None if run else chosen)
        config = toy.config()
        model = toy.chunks(config, [dist.get_rank()])
        finalized: list[Any] = []

        def finalize(*_: Any, into: list[Any] = finalized, **named: Any) -> None:
            into.append(named["pg_collection"] is groups)

        config.finalize_model_grads_func = finalize
        communicator = P2PCommunicator(pp_group=groups.pp, config=config)
        reports = toy.step(
            config, model, run=run, p2p_communicator=communicator, pg_collection=groups
        )
        found.append((reports, finalized, model[0].weight.grad.tolist()))
    with pytest.raises(
        ScheduleError, match="pass both p2p_communicator and pg_collection"
    ):
        toy.step(config, model, pg_collection=groups)
    return found[0], found[1]


def test_groups_may_be_given() -> None:
    for stock, own in run_ranks(2, _given_groups):
        assert own[1] == [True]
        assert _plain(own) == _plain(stock)


def _reports_are_by_micro_batch() -> list[float]:
    """A table that runs micro-batches backwards, on both stages of each rank."""
    toy.start(2)
    chosen = make_pipeline("zb-v", 2, M)
    use(chosen)
    config = toy.config()
    stages = chosen.placement.stages_of[dist.get_rank()]
    table = chosen.schedule(M)
    rows = tuple(
        tuple(a._replace(microbatch=M - 1 - a.microbatch) for a in row)
        for row in table.rows
    )
    chosen._tables[M] = replace(table, rows=rows)
    reports = toy.step(config, toy.chunks(config, list(stages)))
    return [report["loss"].item() for report in reports]


def _one_process() -> list[float]:
    losses = []
    made = toy.config()
    model = [toy.Stage(made, stage, None) for stage in range(4)]
    for x in toy.samples(M):
        for stage in model:
            stage.set_input_tensor([None])
            x = stage(x)
        losses.append(x.square().sum().item())
    return losses


def test_reports_are_in_the_order_of_micro_batches_whatever_ran_first() -> None:
    found = run_ranks(2, _reports_are_by_micro_batch)
    assert found == [run_ranks(1, _one_process)[0], []]


class _View(toy.Stage):
    """A stage that returns a view."""

    def forward(self, data: torch.Tensor | None) -> torch.Tensor:
        return super().forward(data).mT.mT


def _with_views() -> Any:
    toy.start(2)
    use(make_pipeline("1f1b", 2, M))
    config = toy.config()
    model: list[toy.Stage] = [_View(config, dist.get_rank(), None)]
    trained = toy.step(config, model)
    with torch.no_grad():
        return _plain([trained, toy.step(config, model, forward_only=True)])


def test_stages_may_hand_on_views() -> None:
    [_, (trained, evaluated)] = run_ranks(2, _with_views)
    assert len(trained) == M
    assert evaluated == trained


def _waits_in_vain() -> str:
    toy.start(2)
    use(make_pipeline("1f1b", 2, M, message_timeout_s=1.0))
    config = toy.config()
    model = toy.chunks(config, [dist.get_rank()])
    if dist.get_rank() == 0:
        time.sleep(6)  # rank 1 must give up long before
        return ""
    # Both ranks compare models and tables at the first step; rank 0 takes no part in this one.
    from megatron_ext.runtime import runtime

    runtime.check_same_table = lambda *_: None
    runtime.features = list
    with pytest.raises(TransportError) as raised:
        toy.step(config, model)
    return str(raised.value)


def test_a_rank_that_waits_too_long_says_for_what() -> None:
    message = run_ranks(2, _waits_in_vain)[1]
    assert (
        "rank 1 (pipeline rank 1) cannot run 1F0, action 0 of its 8 in 1f1b" in message
    )
    assert (
        "the activation that stage 1 needs for micro-batch 0 did not come from rank 0"
        in message
    )


def _different_tables() -> None:
    toy.start(2)
    use(make_pipeline(("1f1b", "gpipe")[dist.get_rank()], 2, M))
    config = toy.config()
    toy.step(config, toy.chunks(config, [dist.get_rank()]))


def test_ranks_with_different_tables_do_not_start() -> None:
    ended = start_ranks(2, _different_tables, timeout_s=60)
    assert ended.exit_codes == [1, 1]
    assert (
        "the table for 1f1b on rank 0 differs from the tables on ranks 1"
        in ended.logs[0]
    )
    assert (
        "the table for gpipe on rank 1 differs from the tables on ranks 0"
        in ended.logs[1]
    )


def _misfit(name: str, stages: int) -> str:
    toy.start(2)
    use(make_pipeline(name, 4 if name == "gpipe" else 2, M))
    config = toy.config()
    with pytest.raises(ScheduleError) as raised:
        toy.step(config, toy.chunks(config, list(range(stages))))
    return str(raised.value)


def test_a_model_that_does_not_fit_is_refused() -> None:
    assert "was chosen for 4 pipeline ranks" in run_ranks(2, _misfit, "gpipe", 1)[0]
    assert (
        "needs 2 model chunks on each rank, but the model has 1"
        in run_ranks(2, _misfit, "zb-v", 1)[0]
    )


def _failing_step() -> None:
    toy.start(2)
    use(make_pipeline("zb-h1", 2, M))
    config = toy.config()
    model = toy.chunks(config, [dist.get_rank()])

    def broken(*_: Any) -> Any:
        raise RuntimeError("the model is broken")

    model[0].forward = broken  # type: ignore[method-assign]
    from tests.pipelines import splits

    with pytest.raises((RuntimeError, TransportError)):
        toy.step(config, model)
    assert splits().pending() == []


def test_an_error_of_the_model_comes_out_and_leaves_nothing() -> None:
    run = start_ranks(2, _failing_step, timeout_s=60)
    assert run.exit_codes[0] == 0, run.describe()


def _reads_on_all_stages(data: Any, model: toy.Stage) -> tuple[torch.Tensor, Any]:
    """Take the data out of the item on each stage, as forward steps that write into it do."""
    item = next(data).pop("x")
    return model(item if model.number == 0 else None), toy._loss


def _shared_data(name: str, ranks: int) -> list[Any]:
    toy.start(ranks)
    chosen = make_pipeline(name, ranks, M)
    use(chosen)
    stages = list(chosen.placement.stages_of[dist.get_rank()])
    found: list[Any] = []
    for way in ("one for each", "shared", "the same for each"):
        model = toy.chunks(toy.config(), stages)
        each = [({"x": x} for x in toy.samples(M)) for _ in stages]
        ways: dict[str, Any] = {
            "one for each": each,
            "shared": each[0],
            "the same for each": [each[0]] * len(stages),
        }
        data = ways[way]
        reports = toy.step(
            model[0].config,
            model,
            data_iterator=data,
            forward_step_func=_reads_on_all_stages,
        )
        found.append((reports, [chunk.weight.grad for chunk in model]))
        assert next(each[0], None) is None  # a step takes its micro-batches and no more
    with pytest.raises(ScheduleError) as raised:
        toy.step(model[0].config, model, data_iterator=[each[0]] * 3)
    return [*found, str(raised.value)]


def test_chunks_may_share_one_data_iterator() -> None:
    for many, one, same, told in run_ranks(2, _shared_data, "zb-v", 2):
        assert _plain(many[0]) == _plain(one[0]) == _plain(same[0])
        assert all(map(torch.equal, many[1], one[1]))
        assert all(map(torch.equal, many[1], same[1]))
        assert told == (
            "data_iterator has 3 iterators, but this rank holds 2 model chunks; pass one iterator "
            "per chunk, or a single one that all chunks share"
        )


def _incomplete_model(lacks: tuple[str, ...]) -> str:
    toy.start(1)
    use(make_pipeline("1f1b", 1, M))
    bare = type("Tower", (torch.nn.Linear,), {})(4, 4)
    usual = {
        "config": toy.config(),
        "model_type": None,
        "set_input_tensor": lambda _: None,
    }
    for name in set(usual) - set(lacks):
        setattr(bare, name, usual[name])
    wrapped = torch.nn.Module()
    wrapped.module = bare
    with pytest.raises(ScheduleError) as raised:
        toy.step(toy.config(), [wrapped])  # type: ignore[list-item]
    return str(raised.value)


@pytest.mark.parametrize(
    ("lacks", "named"),
    [
        (("config",), "`config`"),
        (("set_input_tensor",), "`set_input_tensor`"),
        (("config", "set_input_tensor"), "`config`, `set_input_tensor`"),
    ],
)
def test_a_model_without_what_megatron_reads_is_refused(
    lacks: tuple[str, ...], named: str
) -> None:
    [told] = run_ranks(1, _incomplete_model, lacks)
    assert "\n" not in told
    assert told.startswith(f"Tower lacks {named}; ")


def _without_a_type() -> str:
    from megatron_ext.upstream.signatures import needed_of_models

    return (
        _incomplete_model(("model_type",)) if "model_type" in needed_of_models() else ""
    )


def test_a_model_without_its_type_is_refused_where_megatron_reads_it() -> None:
    [told] = run_ranks(1, _without_a_type)
    assert not told or told.startswith("Tower lacks `model_type`; ")


def _wrapped_by_torch() -> list[str]:
    from megatron.core import parallel_state
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from megatron_ext.runtime import entry

    toy.start(2)
    replicas = parallel_state.get_data_parallel_group()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
    wrappers = (
        lambda stage: torch.nn.parallel.DistributedDataParallel(
            stage, process_group=replicas
        ),
        lambda stage: fully_shard(stage, mesh=mesh),
    )
    refusals = []
    use(make_pipeline("zb-h1", 2, M))
    for wrap in wrappers:
        config = toy.config()
        [stage] = toy.chunks(config, [dist.get_rank()])
        with pytest.raises(ScheduleError) as raised:
            toy.step(config, [wrap(stage)])
        refusals.append(str(raised.value))
    config = toy.config(no_sync_func=nullcontext, grad_sync_func=lambda _weights: None)
    [stage] = toy.chunks(config, [dist.get_rank()])
    silenced = torch.nn.parallel.DistributedDataParallel(stage, process_group=replicas)
    silenced.number = stage.number  # what the forward step reads
    toy.step(config, [silenced])
    [stage] = toy.chunks(toy.config(), [dist.get_rank()])
    wrapped = [torch.nn.parallel.DistributedDataParallel(stage, process_group=replicas)]
    entry._refuse_torchs_wrappers(make_pipeline("1f1b", 2, M), wrapped)
    for pipeline in (
        make_pipeline("1f1b", 2, M, dynamic=DynamicOrder()),
        make_pipeline("bitpipe", 4, 8, options={"order": "paper"}),
    ):
        with pytest.raises(ScheduleError, match="in a different order on each replica"):
            entry._refuse_torchs_wrappers(pipeline, wrapped)
    return refusals


def _chunk(**settings: Any) -> torch.nn.Module:
    """A chunk with a decoder whose layers Megatron has numbered by these settings."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    chunk = torch.nn.Module()
    chunk.config = SimpleNamespace(**settings)  # type: ignore[assignment]
    decoder = TransformerBlock.__new__(TransformerBlock)
    torch.nn.Module.__init__(decoder)
    chunk.decoder = decoder
    return chunk


def _check_numbers(schedule: str, chunk: torch.nn.Module) -> None:
    entry._check_layer_numbers(make_pipeline(schedule, 2, M), 0, [chunk])


@pytest.mark.parametrize(
    "settings",
    [{"mtp_num_layers": 1}, {"moe_layer_freq": [0, 1]}, {"moe_layer_freq": 2}],
    ids=str,
)
def test_a_v_without_its_layout_is_refused_where_numbers_of_layers_matter(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Without it, Megatron gives layers the numbers of other stages and trains another model."""
    without = _chunk(pipeline_model_parallel_layout=None, **settings)
    with pytest.raises(ScheduleError, match="built without the layout of zb-v"):
        _check_numbers("zb-v", without)
    _check_numbers("zb-h1", without)
    _check_numbers(
        "zb-v", _chunk(pipeline_model_parallel_layout="E|t|t|tL", **settings)
    )
    assert not caplog.messages


def test_a_v_without_its_layout_is_said(caplog: pytest.LogCaptureFixture) -> None:
    _check_numbers(
        "zb-v", _chunk(pipeline_model_parallel_layout=None, moe_layer_freq=1)
    )
    assert "checkpoints name its layers differently" in caplog.text


def test_torchs_data_parallelism_is_refused_where_weight_gradients_come_later() -> None:
    """Its hooks would reduce gradients in I, before W has computed any."""
    for ddp, fsdp in run_ranks(2, _wrapped_by_torch):
        assert ddp.startswith(
            "a model chunk holds torch's DistributedDataParallel, whose hooks"
        )
        assert fsdp.startswith("a model chunk holds torch's FSDPModule, whose hooks")
        assert "wrap chunks in Megatron's DistributedDataParallel" in fsdp


def _without_plans() -> list[str]:
    """Run pairs with a model that has no plans, then with a forward step that makes none."""
    toy.start(1)
    told = []
    for lacks in ("the model", "the step"):
        use(make_pipeline("1f1b", 1, M, pairs=True))
        config = toy.config(
            overlap_moe_expert_parallel_comm=True,
            expert_model_parallel_size=2,
            num_moe_experts=2,
            moe_token_dispatcher_type="alltoall",
            add_bias_linear=False,
            bf16=True,
        )
        model = toy.chunks(config, [0])
        if lacks == "the step":
            model[0].build_schedule_plan = None
        with pytest.raises(ScheduleError) as raised:
            toy.step(config, model)
        told.append(str(raised.value))
    return told


def test_pairs_need_plans_of_the_model_and_of_the_forward_step() -> None:
    [(model, step)] = run_ranks(1, _without_plans)
    assert model.startswith(
        "Stage cannot run in pairs, because it has no method build_schedule_plan"
    )
    assert step.startswith(
        "the forward step cannot run in pairs, because it has no argument return_"
    )


def _without_a_choice() -> bool:
    from megatron.core.pipeline_parallel import get_forward_backward_func, schedules

    toy.start(2)
    use(None)
    return (
        get_forward_backward_func()
        is schedules.forward_backward_pipelining_without_interleaving
    )


def test_without_a_choice_upstream_runs_itself() -> None:
    assert run_ranks(2, _without_a_choice) == [True, True]


def _kept_too_long(settings: dict[str, Any]) -> tuple[str, str]:
    """Run a schedule from before `configure` while another is in force, and that one after it."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    toy.start(2)
    before = get_forward_backward_func()
    sizes = {"pipeline_ranks": 2, "num_microbatches": M, "num_layers": 8}
    megatron_ext.configure(megatron_ext.PipelineConfig(**settings), **sizes)
    config = toy.config()
    model = toy.chunks(config, [dist.get_rank()])
    ours = get_forward_backward_func()
    toy.step(config, model, run=ours)
    told = []
    for run in (before, ours):
        try:
            toy.step(config, model, run=run)
        except ScheduleError as error:
            told.append(str(error))
        else:
            told.append("")
        megatron_ext.deconfigure()
    return told[0], told[1]


@pytest.mark.parametrize(
    ("settings", "of_the_other", "of_ours"),
    [
        (
            {"schedule": "zb-h1"},
            "Megatron's own schedule is running although schedule zb-h1 was configured",
            "this schedule's configuration is no longer",
        ),
        ({"transport": "shm"}, "although a transport was configured", ""),
    ],
)
def test_a_schedule_that_is_not_in_force_does_not_run(
    settings: dict[str, Any], of_the_other: str, of_ours: str
) -> None:
    for other, ours in run_ranks(2, _kept_too_long, settings):
        assert of_the_other in other
        assert (
            (of_ours in ours) if of_ours else not ours
        )  # Megatron's own, which is in force then


def _with_several_modules() -> list[str]:
    """Ask for the schedule of two models in one job, as MIMO does, and run a step with them."""
    from megatron.core import process_groups_config
    from megatron.core.pipeline_parallel import get_forward_backward_func

    name = "MultiModuleProcessGroupCollection"  # 0.16 has none
    kind = getattr(process_groups_config, name, None) or type(name, (), {})
    setattr(process_groups_config, name, kind)
    modules = object.__new__(kind)
    toy.start(1)
    use(make_pipeline("1f1b", 2, M))
    told = []
    config = toy.config()
    model = toy.chunks(config, [dist.get_rank()])
    calls = (
        lambda: get_forward_backward_func(2, None, modules),
        lambda: get_forward_backward_func(pp_size=2, schedule_pg_collection=modules),
        lambda: toy.step(
            config, model, pg_collection=modules, p2p_communicator=object()
        ),
    )
    for call in calls:
        with pytest.raises(ScheduleError) as caught:
            call()
        told.append(str(caught.value))
    return told


def test_several_models_in_one_job_are_refused() -> None:
    for told in run_ranks(2, _with_several_modules):
        assert len(told) == 3
        assert set(told) == {told[0]}
        assert "schedule_pg_collection is for several modules (MIMO)" in told[0]
        assert "remove --pipeline-schedule" in told[0]


def _overwriting(file: str) -> str:
    """Run a table with layers that overwrite the gradient of a step's first micro-batch."""
    toy.start(2)
    use(make_pipeline(f"csv:{file}", 2, 2))
    config = toy.config()
    model = toy.chunks(config, [dist.get_rank()])
    model[0].fuse_wgrad_accumulation = model[0].is_first_microbatch = True  # type: ignore[assignment]
    with pytest.raises(ScheduleError) as raised:
        toy.step(config, model, 2)
    return str(raised.value)


def test_a_table_that_would_lose_gradients_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_text("0F1,0F0,0B0,0B1\n1F1,1F0,1B0,1B1\n")
    for stage, told in enumerate(run_ranks(2, _overwriting, str(file))):
        assert (
            f"the first weight gradients of stage {stage} are those of micro-batch 0"
            in told
        )
