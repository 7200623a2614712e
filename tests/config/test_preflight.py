"""`preflight` names all that a configuration takes, changes and refuses, on any machine."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from typing import Any

import pytest

import megatron_ext
from megatron_ext import Disaggregation, DynamicOrder, PipelineConfig, preflight

SIZES = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 4,
    "world_size": 16,
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "num_layers": 32,
    "seq_length": 4096,
}
ZB_V = PipelineConfig(schedule="zb-v")
SLICES = (
    "--pipeline-model-parallel-size 4 --pipeline-schedule zb-h1 --pipeline-slices 2"
)


def rules(settings: dict[str, Any], config: PipelineConfig = ZB_V) -> list[str]:
    """Return the rules that refuse settings."""
    return [
        refusal.rule for refusal in preflight({**SIZES, **settings}, config).refusals
    ]


def test_a_recipe_is_accepted() -> None:
    found = preflight(SIZES, ZB_V)
    assert (found.accepted, found.refusals, found.ignored) == (True, [], [])
    assert found.pipeline is not None
    assert found.pipeline.num_microbatches == 8


def test_all_refusals_are_collected() -> None:
    settings = {
        "cuda_graph_impl": "transformer_engine",
        "ckpt_format": "torch_dcp",
        "delay_wgrad_compute": True,
        "global_batch_size": 15,
        "moe_paged_stash": True,
        "use_megatron_fsdp": True,
    }
    assert rules(settings) == [
        "global_batch_size",
        "use_megatron_fsdp",
        "ckpt_format",
    ]
    found = preflight({**SIZES, **settings}, ZB_V)
    for refusal in found.refusals:
        assert refusal.reason
        assert refusal.remedy
        assert str(refusal) == f"{refusal.reason}; {refusal.remedy}"
    with pytest.raises(megatron_ext.errors.ArgumentsError) as caught:
        found.raise_refusals()
    assert str(caught.value).splitlines() == [
        str(refusal) for refusal in found.refusals
    ]


def test_a_training_names_all_refusals_too() -> None:
    settings = {"use_megatron_fsdp": True, "ckpt_format": "torch_dcp"}
    args = Namespace(**SIZES, **settings)
    assert [one.rule for one in preflight(args, ZB_V).refusals] == rules(settings)


@pytest.mark.parametrize(
    ("given", "off"),
    [
        ({"cuda_graph_impl": "local"}, {"cuda_graph_impl": "none"}),
        ({"enable_cuda_graph": True}, {"enable_cuda_graph": False}),
        # Megatron would set --cuda-graph-impl again.
        (
            {"cuda_graph_impl": "local", "cuda_graph_modules": ["full_iteration"]},
            {"cuda_graph_impl": "none", "cuda_graph_modules": []},
        ),
        (
            {"moe_paged_stash": True, "moe_expert_rank_capacity_factor": 1.5},
            {"moe_paged_stash": False, "moe_expert_rank_capacity_factor": None},
        ),
        ({"num_experts": 8, "use_transformer_engine_op_fuser": True},
         {"use_transformer_engine_op_fuser": False}),
    ],
)  # fmt: skip
def test_what_a_schedule_does_without_is_dropped(
    given: dict[str, Any], off: dict[str, Any]
) -> None:
    found = preflight({**SIZES, **given}, ZB_V)
    assert found.accepted
    assert found.arguments.items() >= off.items()
    assert len([line for line in found.changes if " is dropped: " in line]) == 1
    # Beside a schedule, what excludes graphs has nothing to exclude.
    for config in (PipelineConfig(schedule="zb-v", variable_seq_lengths=True),
                   PipelineConfig(dynamic=DynamicOrder())):  # fmt: skip
        assert preflight({**SIZES, "moe_token_dispatcher_type": "alltoall", **given},
                         config).accepted  # fmt: skip


@pytest.mark.parametrize(
    ("given", "config", "off"),
    [
        (
            {"num_virtual_stages_per_pipeline_rank": 2, "overlap_p2p_comm_warmup_flush": True},
            PipelineConfig(schedule="zb-h1"),
            {"overlap_p2p_comm_warmup_flush": False},
        ),
        (
            {"cuda_graph_impl": "local", "inference_cuda_graph_scope": "layer"},
            ZB_V,
            {"cuda_graph_impl": "none", "inference_cuda_graph_scope": "none"},
        ),
        (
            {"cuda_graph_impl": "local", "rl_persist_cuda_graphs": True},
            PipelineConfig(schedule="zb-h1"),
            {"cuda_graph_impl": "none", "rl_persist_cuda_graphs": False},
        ),
        (
            {"overlap_moe_expert_parallel_comm": True, "num_experts": 8,
             "expert_model_parallel_size": 2, "ep_overlap_early_attn_memory_release": True},
            PipelineConfig(schedule="zb-v", slices=2),
            {"overlap_moe_expert_parallel_comm": False,
             "ep_overlap_early_attn_memory_release": False},
        ),
        *(
            (
                {"overlap_moe_expert_parallel_comm": True, "num_experts": 8, "bf16": True,
                 "expert_model_parallel_size": 2, "ep_overlap_early_attn_memory_release": True,
                 **unpaired},
                ZB_V,
                {"overlap_moe_expert_parallel_comm": False,
                 "ep_overlap_early_attn_memory_release": False},
            )
            for unpaired in ({"fp4": "e2m1"}, {"sft": True},
                             {"dataloader_inter_document_masking": True})
        ),
    ],
)  # fmt: skip
def test_what_depends_on_a_dropped_setting_goes_with_it(
    given: dict[str, Any], config: PipelineConfig, off: dict[str, Any]
) -> None:
    # Megatron refuses one without the other.
    found = preflight({**SIZES, "world_size": 8, **given}, config)
    assert found.accepted, found.refusals
    assert found.arguments.items() >= off.items()


@pytest.mark.parametrize("config", [ZB_V, PipelineConfig(transport="shm")])
def test_a_decoder_may_have_another_length(config: PipelineConfig) -> None:
    assert preflight({**SIZES, "decoder_seq_length": 2048}, config).accepted


@pytest.mark.parametrize(
    ("settings", "config", "wanted"),
    [
        ({"num_moe_experts": 8, "moe_token_dispatcher_type": "allgather"}, {}, []),
        (
            {"num_moe_experts": 8, "moe_token_dispatcher_type": "allgather"},
            {"variable_seq_lengths": True},
            ["moe_token_dispatcher_type"],
        ),
        ({"tp_comm_overlap": True, "gradient_accumulation_fusion": False}, {}, []),
        ({"pipeline_model_parallel_size": 1}, {}, ["pipeline_schedule"]),
    ],
)
def test_names_of_configuration_objects(
    settings: dict[str, Any], config: dict[str, Any], wanted: list[str]
) -> None:
    assert rules(settings, PipelineConfig(schedule="zb-v", **config)) == wanted


def test_slices_run_without_pairs() -> None:
    config = PipelineConfig(schedule="zb-v", slices=2)
    experts = {"num_experts": 8, "expert_model_parallel_size": 2, "world_size": 8}
    found = preflight(
        {**SIZES, **experts, "overlap_moe_expert_parallel_comm": True}, config
    )
    assert found.accepted
    assert found.arguments["overlap_moe_expert_parallel_comm"] is False
    assert any(line.startswith("--overlap-moe-expert-p") for line in found.changes)


def test_roles_have_their_rules_by_fields_too() -> None:
    merged = PipelineConfig(disaggregation=Disaggregation(merged=True))
    refused = rules({"num_experts": 8, "expert_model_parallel_size": 1}, merged)
    assert "ignore_forward_tensor_parallel" in refused
    ships = PipelineConfig(disaggregation=Disaggregation(activations="ship"))
    assert "fbd_activations" in rules({"mtp_num_layers": 1}, ships)


def test_settings_within_settings_are_refused() -> None:
    [refusal] = preflight(
        {"model": {**SIZES, "use_megatron_fsdp": True}}, ZB_V
    ).refusals
    assert (
        str(refusal)
        == "model contains nested settings, which are not read; pass each one by its own name"
    )
    assert preflight({**SIZES, "tp_comm_overlap_cfg": {"qkv_fprop": {}}}, ZB_V).accepted


def test_what_nobody_knows_is_ignored() -> None:
    settings = {
        **SIZES,
        "lr": 1e-4,
        "hidden_size": 64,
        "gpu_type": "b200",
        "_hf": "some/model",
    }
    assert preflight(settings, ZB_V).ignored == ["_hf", "gpu_type"]


def test_what_sizes_do_not_say_is_not_checked() -> None:
    found = preflight({"pipeline_model_parallel_size": 4}, ZB_V)
    assert found.accepted
    unchecked = [
        line.removesuffix(" is missing").partition(" is not checked, because ")
        for line in found.notices
    ]
    assert [(subject, missing) for subject, found_, missing in unchecked if found_] == [
        ("the number of micro-batches", "--micro-batch-size or --global-batch-size"),
        ("the cut into stages", "--num-layers"),
    ]


def test_words_of_a_command_line() -> None:
    words = "--pipeline-model-parallel-size 4 --num-layers 32 --micro-batch-size 1 "
    words += "--global-batch-size 16 --pipeline-schedule zb-v --swiglu --lr 1e-4"
    found = preflight(words.split())
    assert found.accepted
    assert found.pipeline is not None
    assert (found.pipeline.name, found.pipeline.num_microbatches) == ("zb-v", 16)
    line = preflight(words).pipeline
    assert line is not None
    assert line.name == "zb-v"
    with pytest.raises(megatron_ext.errors.ArgumentsError, match="close the quotation"):
        preflight(f"{words} --tokenizer-model 'my model")
    words += (
        " --no-gradient-accumulation-fusion --fp8-format hybrid --delay-wgrad-compute"
    )
    words += " --use-megatron-fsdp"
    found = preflight(words.split(), world_size=8)
    assert [refusal.rule for refusal in found.refusals] == ["use_megatron_fsdp"]
    assert [line.split()[0] for line in found.changes] == ["--delay-wgrad-compute"]
    words = "--use-dpp --pipeline-schedule zb-v --dpp-policy wrong"
    [refusal] = preflight(words.split()).refusals
    assert str(refusal).startswith(
        "'wrong' is not a value of --dpp-policy; use one of hint, "
    )


def test_flags_of_the_environment_count_for_a_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = (
        "--pipeline-model-parallel-size 4 --num-layers 32 --use-megatron-fsdp".split()
    )
    assert preflight(words).accepted
    monkeypatch.setenv("MEGATRON_EXT_FLAGS", "--pipeline-schedule zb-v")
    assert [refusal.rule for refusal in preflight(words).refusals] == [
        "use_megatron_fsdp"
    ]
    found = preflight([*words[:-1], "--pipeline-schedule", "zb-h1"])
    assert found.pipeline is not None
    assert found.pipeline.name == "zb-h1"


def test_the_layers_of_a_pattern_are_cut() -> None:
    # Not as a command line: 0.16 has no such flag, and refuses it.
    settings = {"pipeline_model_parallel_size": 2, "hybrid_layer_pattern": "M*M*/MM"}
    found = preflight(settings, PipelineConfig(schedule="zb-v"))
    assert found.arguments["hybrid_layer_pattern"] == "M|*|M|*/MM"
    assert any(
        line.endswith("--hybrid-layer-pattern 'M|*|M|*/MM'") for line in found.changes
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"world_size": float("nan")},
            "--world-size nan must be a whole number of at least 0",
        ),
        ({"num_layers": "32"}, "'32'"),
        (
            {"pipeline_model_parallel_layout": 2},
            "layout 2 must be text in Megatron's notation",
        ),
        (
            {"pipeline_model_parallel_layout": [["x"]]},
            "has a layer 'x'; use embedding, ",
        ),
        (
            {"micro_batch_size": None, "global_batch_size": True},
            "must be a whole number",
        ),
        ({"num_experts": [8]}, "must be a whole number"),
    ],
)
def test_values_of_other_types_are_refused(
    settings: dict[str, Any], reason: str
) -> None:
    [refusal] = preflight({**SIZES, **settings}, ZB_V).refusals
    assert reason in str(refusal)


def test_a_configuration_of_another_type_is_refused() -> None:
    found = preflight({**SIZES, "pipeline_costs": 0, "pipeline_schedule": "zb-v"})
    assert [str(refusal) for refusal in found.refusals] == [
        "costs 0 must be a Costs object or None"
    ]


def test_flags_that_megatron_needs_are_named() -> None:
    words = "--num-layers 8 --seq-length 16 --pipeline-model-parallel-size 2".split()
    assert preflight(words).accepted, "flags alone may be some of a training's"
    missing = [
        refusal.rule for refusal in preflight(["pretrain_gpt.py", *words]).refusals
    ]
    needed = "hidden_size num_attention_heads max_position_embeddings micro_batch_size train_iters"
    assert missing == [*needed.split(), "eval_interval"]
    assert preflight(["pretrain_gpt.py", *words, "--use-checkpoint-args"]).accepted


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            "--seq-length 32",
            "--seq-length above --max-position-embeddings: tokens would have",
        ),
        (
            "--expert-model-parallel-size 2",
            "--expert-model-parallel-size above 1 without --num",
        ),
        (
            "--num-attention-heads 3",
            "--hidden-size 64 is not a multiple of --num-att",
        ),
        ("--num-attention-heads 3 --kv-channels 16", ""),
    ],
)
def test_sizes_that_megatron_asserts(flags: str, reason: str) -> None:
    words = (
        "pretrain_gpt.py --num-layers 8 --seq-length 16 --max-position-embeddings 16 "
    )
    words += (
        "--hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --train-iters 3 "
    )
    refusals = preflight(f"{words}--eval-interval 3 {flags}", world_size=2).refusals
    assert [str(refusal).startswith(reason) for refusal in refusals] == [True] * bool(
        reason
    )


def test_stages_without_layers_are_said() -> None:
    found = preflight({**SIZES, "num_layers": 3}, ZB_V)
    [line] = [line for line in found.changes if "have no layer" in line]
    assert line.startswith(
        "5 of the 8 stages of --pipeline-schedule zb-v have no layer"
    )
    assert line.endswith("; use --num-layers 8 or more, or fewer ranks")


@pytest.mark.parametrize(("device", "accepted"), [("auto", False), ("cpu", True)])
def test_defaults_are_those_of_the_device(device: str, accepted: bool) -> None:
    words = f"{SLICES} --transformer-impl local --bf16 --device-backend {device}"
    assert preflight(words.split()).accepted is accepted


def test_groups_that_files_by_rank_need_are_made_and_named() -> None:
    by_rank = {"ckpt_format": "torch", "use_distributed_optimizer": True}
    settings = {**SIZES, **by_rank, "enable_gloo_process_groups": False}
    found = preflight(settings, ZB_V)
    assert found.arguments["enable_gloo_process_groups"] is True
    assert [
        line
        for line in found.changes
        if line.startswith("Gloo process groups are created")
    ]
    settings["enable_gloo_process_groups"] = True
    assert not any("Gloo" in line for line in preflight(settings, ZB_V).changes)


@pytest.mark.parametrize(
    ("config", "settings", "reason"),
    [
        (
            PipelineConfig(disaggregation=Disaggregation()),
            {"num_experts": 8, "overlap_moe_expert_parallel_comm": True},
            "forward and backward passes run on different ranks",
        ),
        (
            PipelineConfig(disaggregation=Disaggregation()),
            {"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True},
            "forward ranks receive new weights in the model's precision and cast them",
        ),
    ],
)
def test_what_another_order_has_no_use_for_is_dropped(
    config: PipelineConfig, settings: dict[str, Any], reason: str
) -> None:
    """Megatron then runs as without it, under the other schedules with it."""
    found = preflight({**SIZES, **settings, "expert_model_parallel_size": 2}, config)
    assert found.accepted
    switches = [name for name, value in settings.items() if value is True]
    assert [found.arguments[name] for name in switches] == [False] * len(switches)
    [line] = found.changes
    assert reason in line
    assert found.config is not None
    assert not found.config.pairs


@pytest.mark.parametrize(
    ("config", "settings", "refused"),
    [
        (PipelineConfig(dynamic=DynamicOrder()), {}, []),
        (
            PipelineConfig(dynamic=DynamicOrder()),
            {"fp8": "hybrid", "fp8_recipe": "delayed"},
            1,
        ),
        (PipelineConfig(disaggregation=Disaggregation()), {}, []),
        (
            PipelineConfig(disaggregation=Disaggregation()),
            {"context_parallel_size": 2, "world_size": 32},
            [],
        ),
        (
            PipelineConfig(disaggregation=Disaggregation()),
            {"world_size": 8},
            ["disaggregation"],
        ),
        (PipelineConfig(), {"cuda_graph_impl": "local"}, []),
        (PipelineConfig(transport="tcp"), {"use_ring_exchange_p2p": True}, 1),
    ],
)
def test_every_way_to_run(
    config: PipelineConfig, settings: dict[str, Any], refused: list[str] | int
) -> None:
    found = rules(settings, config)
    assert found == refused if isinstance(refused, list) else len(found) == refused


def test_it_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "import megatron_ext\n"
        "sizes = dict(pipeline_model_parallel_size=4, num_layers=32, micro_batch_size=1)\n"
        "sizes |= dict(global_batch_size=8, num_experts=8, pipeline_model_parallel_layout=None)\n"
        "for name in ('1f1b', 'zb-v', 'bitpipe'):\n"
        "    config = megatron_ext.PipelineConfig(schedule=name)\n"
        "    print(megatron_ext.preflight(sizes, config).refusals)\n"
        "assert 'megatron.core' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["[]"] * 3, done.stderr
