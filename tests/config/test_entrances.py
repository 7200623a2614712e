"""Parsed arguments after `prepare` and `check`: choices, hints to Megatron, refusals."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from megatron_ext import devices
from megatron_ext.config import active
from megatron_ext.config.entrances import check, prepare
from megatron_ext.config.flags import add_arguments
from megatron_ext.config.incompatible import RULES
from megatron_ext.errors import ArgumentsError, UserError
from megatron_ext.schedules import generate
from megatron_ext.schedules.table import table_files
from tests.pipelines import make_pipeline

if TYPE_CHECKING:
    from megatron_ext.config.active import Pipeline


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """Arguments as parsed, enough for a schedule, on a device that runs anything."""
    monkeypatch.setattr(devices, "arguments_for", lambda *_: {})
    parser = ArgumentParser()
    add_arguments(parser)
    return Namespace(
        **vars(parser.parse_args([])),
        pipeline_model_parallel_size=4,
        tensor_model_parallel_size=1,
        world_size=4,
        micro_batch_size=1,
        global_batch_size=8,
        num_layers=8,
    )


def choose(args: Namespace, name: str) -> Pipeline:
    args.pipeline_schedule = name
    prepare(args)
    chosen = active.pipeline()
    assert chosen is not None
    return chosen


def test_preparing_again_changes_nothing(args: Namespace) -> None:
    first = choose(args, "zb-h1")
    said = vars(args).copy()
    again = choose(args, "zb-h1")
    assert again == first
    assert vars(args) == said


@pytest.mark.parametrize("asked", [False, True])
def test_megatrons_flag_decides_whether_replicas_draw_their_own_numbers(
    args: Namespace, asked: bool
) -> None:
    args.data_parallel_random_init = asked
    args.microbatch_rng = True
    prepare(args)
    assert active.required().replicas_differ == asked


@pytest.mark.parametrize(
    "dest",
    [
        "save_activations_interval",
        "save_dgrads_interval",
        "save_tokens_per_expert_interval",
        "moe_routing_trace_path",
    ],
)
def test_slices_refuse_files_that_hold_one_call_per_micro_batch(dest: str) -> None:
    sliced = Namespace(**{dest: 1})
    assert any(rule.refuses(sliced) for rule in RULES["slices"])
    assert not any(rule.refuses(Namespace()) for rule in RULES["slices"])


def test_another_schedule_starts_from_what_was_said(args: Namespace) -> None:
    args.num_layers = 16
    choose(args, "interleaved")
    assert args.num_virtual_stages_per_pipeline_rank == 2
    choose(args, "zb-h1")
    assert args.num_virtual_stages_per_pipeline_rank is None


def test_without_a_schedule_megatrons_own_runs_again(args: Namespace) -> None:
    choose(args, "zb-h1")
    prepare(Namespace())
    assert active.pipeline() is None
    check(Namespace())


def test_every_step_of_a_schedule_of_batches_has_a_table(args: Namespace) -> None:
    args.global_batch_size, args.step_batch_size_schedule = None, "1.5B:12, 0:4 2T:8"
    args.data_parallel_size = 1
    assert choose(args, "1f1b").num_microbatches == 8
    args.step_batch_size_schedule = "0:4 1M:0.01K"  # a size of 10
    assert choose(args, "1f1b").num_microbatches == 10
    args.step_batch_size_schedule = "1.5B:12, 0:4 2T:8"
    args.global_batch_size = 1  # Megatron's own while nothing chooses one
    check(args)
    args.step_batch_size_schedule, args.world_size = "0:1 1B:6", 8
    args.pipeline_schedule = "bitpipe"  # two replicas on each of two pipeline worlds
    with pytest.raises(
        ArgumentsError, match=r"use --step-batch-size-schedule '0:4 1000000000:8'"
    ):
        prepare(args)


def test_every_step_of_a_ramp_up_has_a_table(args: Namespace) -> None:
    args.global_batch_size, args.rampup_batch_size = 12, ["4", "4", "100"]
    chosen = choose(args, "1f1b")
    assert chosen.num_microbatches == 12
    args.rampup_batch_size = ["4", "3", "100"]
    with pytest.raises(
        ArgumentsError, match="does not lead from 4 to --global-batch-size 12"
    ):
        prepare(args)


@pytest.mark.parametrize(("name", "crossings"), [("bitpipe", 2), ("dualpipe", 0)])
def test_first_and_last_stage_are_of_one_replica(name: str, crossings: int) -> None:
    """Tokens and labels of a micro-batch come from one sampler."""
    placement = make_pipeline(name, 8, 16).placement
    assert len(placement.twin_hops) == crossings


def test_megatron_has_to_agree(args: Namespace) -> None:
    choose(args, "1f1b")
    args.data_parallel_size, args.virtual_pipeline_model_parallel_size = 1, 2
    with pytest.raises(
        ArgumentsError, match="prepared for 1 chunks, but Megatron computed 2"
    ):
        check(args)
    assert active.pipeline() is None


@pytest.mark.parametrize(
    ("schedule", "refused"), [("zb-h1", True), ("gpipe", False)], ids=["split", "whole"]
)
def test_layers_that_cannot_be_split_are_refused(
    args: Namespace, monkeypatch: pytest.MonkeyPatch, schedule: str, refused: bool
) -> None:
    from megatron_ext.config import incompatible

    why = lambda args, **_: f"{args.transformer_impl} is old"  # noqa: E731
    monkeypatch.setattr(incompatible, "why_te_cannot_split", why)
    args.transformer_impl, args.data_parallel_size = "transformer_engine", 1
    if not refused:
        choose(args, schedule)
        return
    with pytest.raises(
        ArgumentsError, match="but transformer_engine is old; or use 1f1b"
    ):
        choose(args, schedule)


@pytest.mark.parametrize(("schedule", "told"), [("zb-h1", True), ("gpipe", False)])
def test_layers_that_are_left_whole_are_told(
    args: Namespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    schedule: str,
    told: bool,
) -> None:
    from megatron_ext.config import incompatible

    monkeypatch.setattr(incompatible, "why_te_cannot_split", lambda _args, **_: None)
    monkeypatch.setattr(incompatible, "find_spec", lambda name: name)
    vars(args).update(transformer_impl="transformer_engine", data_parallel_size=1)
    vars(args).update(
        add_bias_linear=True, add_qkv_bias=False, multi_latent_attention=False
    )
    choose(args, schedule)
    check(args)
    notice = "--pipeline-schedule zb-h1: weight gradients of the projections to queries, keys and"
    assert (notice in caplog.text) is told


@pytest.mark.parametrize(
    ("dest", "value", "schedule"),
    [
        ("cpu_offloading", True, "1f1b"),
        ("use_megatron_fsdp", True, "1f1b"),
        ("use_torch_fsdp2", True, "1f1b"),
        ("decoder_num_layers", 4, "1f1b"),
        ("tensor_parallel_num_weight_shards", 2, "1f1b"),
        ("expert_tensor_parallel_num_weight_shards", 2, "1f1b"),
        ("is_hybrid_model", True, "zb-v"),
        ("use_mp_args_from_checkpoint_args", True, "bitpipe"),
    ],
)
def test_features_that_order_computation_are_refused(
    args: Namespace, dest: str, value: object, schedule: str
) -> None:
    setattr(args, dest, value)
    args.pipeline_schedule = schedule
    with pytest.raises(
        ArgumentsError, match=f"--pipeline-schedule {schedule} cannot run with"
    ):
        prepare(args)


@pytest.mark.parametrize(
    ("dest", "value", "schedule"),
    [
        ("hybrid_layer_pattern", "M*M-", "1f1b"),
        ("moe_shared_expert_overlap", True, "zb-v"),
        ("tensor_parallel_num_weight_shards", 1, "zb-h1"),
    ],
)
def test_what_does_not_concern_a_schedule_passes(
    args: Namespace, dest: str, value: object, schedule: str
) -> None:
    setattr(args, dest, value)
    assert choose(args, schedule).name == schedule


@pytest.mark.parametrize(
    ("dest", "value"),
    [
        ("cuda_graph_impl", "full_iteration"),
        ("cuda_graph_scope", ["full_iteration"]),
        ("cuda_graph_scope_deprecated", ["full_iteration"]),
    ],
)
def test_graphs_of_whole_steps_are_refused_with_a_transport_of_ours(
    args: Namespace, dest: str, value: object
) -> None:
    setattr(args, dest, value)
    args.pipeline_transport = "shm"
    with pytest.raises(
        ArgumentsError, match="--pipeline-transport shm cannot run with CUDA graph"
    ):
        prepare(args)
    args.pipeline_transport = "torch"
    prepare(args)


@pytest.mark.parametrize(
    ("setting", "drop", "keep"),
    [
        ("delay_wgrad_compute", ["1f1b", "zb-v"], []),
        ("defer_embedding_wgrad_compute", ["1f1b", "zb-v"], []),
        ("overlap_dispatch_backward_with_experts_wgrad", ["zb-h1"], ["interleaved"]),
        (
            "overlap_param_gather_with_optimizer_step",
            ["zb-h1"],
            ["interleaved", "zb-v"],
        ),
    ],
)
def test_what_the_table_does_itself_is_dropped(
    args: Namespace, setting: str, drop: list[str], keep: list[str], caplog: Any
) -> None:
    for schedule in (*drop, *keep):
        setattr(args, setting, True)
        caplog.clear()
        choose(args, schedule)
        assert getattr(args, setting) is (schedule in keep)
        flag = f"--{setting.replace('_', '-')} is dropped: "
        assert any(flag in line for line in caplog.messages) is (schedule in drop)


def test_a_group_size_without_effect_is_logged(
    args: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    args.microbatch_group_size_per_vp_stage = 8
    choose(args, "1f1b")
    [line] = caplog.messages
    assert line.startswith(
        "--microbatch-group-size-per-virtual-pipeline-stage has no effect"
    )


EXPERTS = {
    "overlap_moe_expert_parallel_comm": True,
    "num_experts": 4,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "bf16": True,
}


def test_the_overlap_of_expert_communication_makes_pairs(args: Namespace) -> None:
    vars(args).update(EXPERTS)
    pipeline = choose(args, "dualpipe-v")
    assert pipeline.config.pairs
    assert any(pipeline.full.pairs)
    assert args.overlap_moe_expert_parallel_comm


@pytest.mark.parametrize("dest", ["num_experts", "expert_model_parallel_size"])
def test_without_experts_on_several_ranks_there_are_no_pairs(
    args: Namespace, caplog: pytest.LogCaptureFixture, dest: str
) -> None:
    vars(args).update({**EXPERTS, dest: None})
    assert choose(args, "1f1b").full.pairs == ()
    assert not args.overlap_moe_expert_parallel_comm, "Megatron refuses it"
    assert caplog.messages[0].startswith(
        "--overlap-moe-expert-parallel-comm has no effect"
    )


def test_what_a_table_does_anyway_is_dropped(
    args: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    vars(args).update({**EXPERTS, "delay_wgrad_compute": True})
    choose(args, "zb-v")
    assert not args.delay_wgrad_compute
    assert any(
        line.startswith("--delay-wgrad-compute is dropped") for line in caplog.messages
    )


def test_plans_recompute_whole_layers_in_16_bits(args: Namespace) -> None:
    vars(args).update({**EXPERTS, "recompute_granularity": "full"})
    assert choose(args, "1f1b").config.pairs
    args.fp8 = "e4m3"
    with pytest.raises(
        ArgumentsError,
        match="differently than in its schedule plans; use --recompute-gran",
    ):
        choose(args, "1f1b")


def test_megatrons_own_overlap_cannot_draw_by_micro_batch(args: Namespace) -> None:
    vars(args).update({**EXPERTS, "microbatch_rng": True, "seed": 1234})
    with pytest.raises(ArgumentsError, match="add --pipeline-schedule interleaved"):
        prepare(args)
    choose(args, "interleaved")


def test_megatrons_own_overlap_is_left_alone(args: Namespace) -> None:
    vars(args).update(EXPERTS)
    prepare(args)
    assert active.pipeline() is None
    assert args.overlap_moe_expert_parallel_comm


@pytest.mark.parametrize(
    ("dest", "value", "reason"),
    [
        (
            "recompute_modules",
            ["core_attn", "moe"],
            "use --recompute-modules core_attn, layernorm",
        ),
        ("moe_shared_expert_overlap", True, "the shared expert hides"),
        ("hybrid_layer_pattern", "M*M-", "hybrid models"),
        ("variable_seq_lengths", True, "does not pass lengths to schedule plans"),
    ],
)
def test_what_plans_cannot_do_is_refused(
    args: Namespace, dest: str, value: object, reason: str
) -> None:
    vars(args).update({**EXPERTS, dest: value})
    args.pipeline_schedule = "1f1b"
    with pytest.raises(ArgumentsError, match=reason):
        prepare(args)


MASKED = {"reset_attention_mask": True, "create_attention_mask_in_dataloader": True}


@pytest.mark.parametrize(
    ("settings", "ranks", "start"),
    [
        (
            {**MASKED, "transformer_impl": "local"},
            4,
            "--reset-attention-mask: Megatron passes",
        ),
        ({**MASKED, "transformer_impl": "local"}, 2, None),
        ({**MASKED, "transformer_impl": "transformer_engine"}, 4, None),
        (
            {"trace": True, "skip_train": True},
            4,
            "--trace records nothing with --skip-train",
        ),
        ({"trace": True}, 4, None),
        (
            {"timing_log_level": 2},
            4,
            "--timing-log-level 2: no times are logged for forward-recv",
        ),
        ({"timing_log_level": 1}, 4, None),
    ],
)
def test_what_has_less_effect_than_it_seems_is_logged(
    args: Namespace,
    settings: dict[str, Any],
    ranks: int,
    start: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    args.pipeline_model_parallel_size = args.world_size = ranks
    args.data_parallel_size = 1
    vars(args).update(
        {"trace_interval": None, "trace_iterations": None, "trace_dir": None}
    )
    vars(args).update(settings)
    choose(args, "1f1b")
    check(args)
    warned = [line for line in caplog.messages if line.startswith("--")]
    assert [line.startswith(start or "") for line in warned] == (
        [] if start is None else [True]
    )


def test_a_dynamic_order_leaves_backwards_whole_where_splitting_is_excluded(
    args: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    vars(args).update(
        use_transformer_engine_op_fuser=True, num_experts=4, use_dpp=True, seed=1
    )
    assert not choose(args, "1f1b").full.splits_backward
    assert "--use-dpp does not split backward passes: Megatron keeps" in caplog.text
    assert args.use_transformer_engine_op_fuser
    assert choose(args, "zb-h1").full.splits_backward
    assert not args.use_transformer_engine_op_fuser


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.rsplit("\n", 2)[0] + "\n", "rows"),
        (lambda text: text.replace("3F7,", ""), "3B7 cannot run here: 3F7 has to run before it"),
        (lambda text: text.replace("2F1", "2F1,2F1"), ">>2F1<<"),
        (lambda text: text.replace("0F2", "0F2x"), "'0F2x' is not an action"),
        (lambda text: text.replace("1F0,1F1,1F2", "1B0,1F0,1F1,1F2", 1), ">>1B0<<"),
    ],
    ids=["truncated", "missing", "duplicated", "no action", "early"],
)  # fmt: skip
def test_a_bad_file_is_shown_with_its_row(
    args: Namespace, tmp_path: Path, damage: Any, message: str
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(
        damage(table_files.csv_text(generate("1f1b", 4, 8)).replace("\r", ""))
    )
    with pytest.raises(UserError) as caught:
        choose(args, f"csv:{path}")
    assert message in str(caught.value)


def test_a_file_of_another_size_says_which_flags_fit(
    args: Namespace, tmp_path: Path
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(table_files.csv_text(generate("zb-h1", 4, 6)))
    with pytest.raises(
        UserError, match=r"runs 6 micro-batches, not 8 .* --global-batch-size 6$"
    ):
        choose(args, f"csv:{path}")
    args.global_batch_size = 6
    assert choose(args, f"csv:{path}").schedule(6).rows == generate("zb-h1", 4, 6).rows
    args.pipeline_model_parallel_size = args.world_size = (
        2  # what was changed since is not undone
    )
    with pytest.raises(UserError, match="use --pipeline-model-parallel-size 4"):
        choose(args, f"csv:{path}")


def test_a_file_runs_pairs_apart_and_the_slices_of_the_flag(
    args: Namespace, tmp_path: Path
) -> None:
    path = tmp_path / "table.csv"
    paired = generate("1f1b", 4, 8, pairs=True)
    path.write_text(table_files.csv_text(paired))
    table = choose(args, f"csv:{path}").full
    assert (table.rows, table.pairs) == (paired.rows, ())
    assert table.label == f"csv:{path} pairs=apart"
    path.write_text(table_files.csv_text(generate("1f1b", 4, 8, slices=2)))
    with pytest.raises(UserError, match="into 2 slices; add --pipeline-slices 2"):
        choose(args, f"csv:{path}")
    args.pipeline_slices = 2
    assert choose(args, f"csv:{path}").full.num_slices == 2
    args.pipeline_slices = 4
    with pytest.raises(
        UserError, match="the file fixes the number of slices at 2, got 4"
    ):
        choose(args, f"csv:{path}")


def test_ranks_that_wait_in_a_circle_are_shown(args: Namespace, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    args.pipeline_model_parallel_size = args.world_size = args.global_batch_size = 2
    with pytest.raises(UserError, match="the ranks' orders form a cycle"):
        choose(args, f"csv:{path}")


def test_auto_leaves_tables_between_devices_to_torch(
    args: Namespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def chosen(world_size: int = 2, **asked: Any) -> str:
        vars(args).update(world_size=world_size, pipeline_model_parallel_size=2, seed=1)
        vars(args).update(
            pipeline_transport=None, pipeline_device_path=None, use_dpp=False
        )
        vars(args).update(asked)
        return choose(args, "1f1b").transport

    caplog.set_level("INFO", logger="megatron_ext")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert chosen(pipeline_transport="auto") == "auto"  # on the CPU
    monkeypatch.setattr(devices, "current", lambda: SimpleNamespace(is_host=False))
    assert chosen(pipeline_transport="shm") == "shm"
    assert (
        chosen(pipeline_transport="auto", use_dpp=True)
        == chosen(use_dpp=True)
        == "auto"
    )
    assert chosen(pipeline_transport="auto", pipeline_device_path="ipc") == "auto"
    assert not caplog.records
    assert chosen(pipeline_transport="auto") == chosen() == "torch"
    [told] = caplog.messages
    assert told.startswith("--pipeline-transport auto: torch.distributed")
    assert "between ranks that do not share device memory" in told
    assert chosen(4, pipeline_transport="auto") == "torch"  # on two hosts


def test_from_device_to_device_there_has_to_be_shared_memory(args: Namespace) -> None:
    args.pipeline_device_path = "ipc"
    for name in ("torch", "tcp", "rdma", None):
        args.pipeline_transport = name
        for schedule in (None, "1f1b"):
            args.pipeline_schedule = schedule
            with pytest.raises(UserError, match="add --pipeline-transport shm"):
                prepare(args)
    args.pipeline_transport = "shm"
    assert choose(args, "1f1b").config.device_path == "ipc"
    args.pipeline_device_path = None
    found = choose(args, "1f1b").config
    assert found.device_path == "auto"
    assert not found.tries_ipc


def test_checksums_are_for_what_passes_the_native_core(args: Namespace) -> None:
    args.pipeline_checksum = True
    for name, path, remedy in (
        ("torch", None, "add --pipeline-transport shm, tcp or rdma"),
        (None, None, "add --pipeline-transport shm, tcp or rdma"),
        ("shm", "ipc", "remove one of them"),
    ):
        args.pipeline_transport, args.pipeline_device_path = name, path
        for schedule in (None, "1f1b"):
            args.pipeline_schedule = schedule
            with pytest.raises(UserError, match=remedy):
                prepare(args)
    args.pipeline_transport, args.pipeline_device_path = "tcp", None
    assert choose(args, "1f1b").config.checksums
    args.pipeline_checksum = False
    assert not choose(args, "1f1b").config.checksums


def test_lengths_that_vary(args: Namespace) -> None:
    """Megatron clears the setting in its validation, and refuses its own default dispatcher."""
    args.variable_seq_lengths, args.moe_token_dispatcher_type = True, "allgather"
    choose(args, "1f1b")
    assert args.moe_token_dispatcher_type == "alltoall"
    args.variable_seq_lengths, args.data_parallel_size = False, 1
    check(args)
    assert args.variable_seq_lengths
    prepare(args)
    assert active.required().config.variable_seq_lengths
    args.num_experts, args.moe_token_dispatcher_type = 4, "allgather"
    with pytest.raises(
        ArgumentsError, match="allgather and --num-experts: it gathers tokens"
    ):
        prepare(args)


@pytest.mark.parametrize(
    ("schedule", "settings", "layout"),
    [
        (
            "interleaved",
            {"decoder_first_pipeline_num_layers": 2, "num_layers": 8},
            None,
        ),
        (
            "interleaved",
            {
                "decoder_first_pipeline_num_layers": 4,
                "decoder_last_pipeline_num_layers": 2,
                "num_layers": 14,
            },
            None,
        ),
        (
            "interleaved",
            {"num_layers": 10, "decoder_first_pipeline_num_layers": 1},
            "E|t|tt|tt|t|tt|t|tL",
        ),
        ("zb-h1", {"num_layers": 10, "decoder_first_pipeline_num_layers": 1}, None),
        (
            "zb-h1",
            {"num_layers": 9, "decoder_first_pipeline_num_layers": 1},
            "Et|ttt|ttt|ttL",
        ),
    ],
)
def test_layers_of_the_ends_stay_where_they_fit(
    args: Namespace, schedule: str, settings: dict[str, Any], layout: str | None
) -> None:
    vars(args).update(settings)
    choose(args, schedule)
    assert getattr(args, "pipeline_model_parallel_layout", None) == layout
    first = settings["decoder_first_pipeline_num_layers"]
    assert args.decoder_first_pipeline_num_layers == (first if layout is None else None)


@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_a_hybrid_pattern_brings_its_layers(args: Namespace, schedule: str) -> None:
    args.num_layers, args.hybrid_layer_pattern = None, "*-|*-|*-|*-/M*"
    assert choose(args, schedule).placement.num_stages == 4
    args.hybrid_layer_pattern = "*-*-*-*-"
    assert choose(args, schedule).placement.num_stages == 4
    args.hybrid_layer_pattern = "*-*-*-*/M*"
    choose(args, schedule)
    assert args.hybrid_layer_pattern == "*-|*-|*-|*/M*"


def test_a_hybrid_pattern_has_the_segments_of_a_v(args: Namespace) -> None:
    args.num_layers, args.hybrid_layer_pattern = None, "M*|-M*-M*|-M/M*"
    args.hybrid_override_pattern = None
    choose(args, "zb-v")
    assert args.hybrid_layer_pattern == "M|*|-M|*-|M|*|-|M/M*"
    args.hybrid_layer_pattern = own = "M|*||-M|*-|M*|-|M/M*"
    choose(args, "zb-v")
    assert args.hybrid_layer_pattern == own
    args.hybrid_layer_pattern, args.hybrid_override_pattern = None, "M*-M*-M*"
    with pytest.raises(ArgumentsError, match=r"only --hybrid-layer-pattern \(since"):
        choose(args, "zb-v")


def test_segments_of_a_hybrid_pattern_are_stages(args: Namespace) -> None:
    args.num_layers, args.hybrid_layer_pattern = None, "*-|*-|*-|*-"
    args.pipeline_model_parallel_size = args.world_size = 2
    args.pipeline_transport = "shm"
    prepare(args)
    carried = active.transport_only()
    assert carried is not None
    assert carried.placement.num_stages == 4
    args.use_dpp, args.seed, args.pipeline_transport = True, 1, None
    prepare(args)
    chosen = active.pipeline()
    assert chosen is not None
    assert chosen.name == "interleaved"
    assert chosen.config.chunks == 2
    args.use_dpp = False
    choose(args, "zb-h1")
    assert args.hybrid_layer_pattern == "*-*-|*-*-"
    args.hybrid_layer_pattern = "*-*-*-*-"
    choose(args, "interleaved")
    assert args.hybrid_layer_pattern == "*-|*-|*-|*-"
    args.hybrid_layer_pattern = "*-|*-|*-|*-"
    assert choose(args, "interleaved").placement.num_stages == 4
    assert not hasattr(args, "num_virtual_stages_per_pipeline_rank")
    args.hybrid_layer_pattern = "*-|*-|*-"
    choose(args, "interleaved")
    assert args.hybrid_layer_pattern == "*|-*|-*|-"
