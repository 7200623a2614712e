"""`megatron_ext.configure` says what to build, and what it puts in force can be ended."""

from __future__ import annotations

from typing import Any

import pytest

import megatron_ext
from megatron_ext import DynamicOrder, PipelineConfig
from megatron_ext.config import active
from megatron_ext.errors import UserError
from tests.ranks import parse, require_training, run_ranks

Case = tuple[dict[str, Any], dict[str, Any]]
"""Settings, and sizes that differ from the usual ones."""


def configured(cases: list[Case]) -> list[dict[str, Any] | str]:
    """Configure this process for each case in turn; return what to build, or the error."""
    return [_configured(settings, sizes) for settings, sizes in cases]


def _configured(
    settings: dict[str, Any], sizes: dict[str, Any]
) -> dict[str, Any] | str:
    usual = {"pipeline_ranks": 4, "num_microbatches": 8, "num_layers": 16}
    try:
        build = megatron_ext.configure(PipelineConfig(**settings), **{**usual, **sizes})
    except UserError as error:
        assert active.active() is None
        return str(error)
    megatron_ext.deconfigure()
    return {
        **build.transformer,
        "replicas": build.replicas,
        "m": build.num_microbatches,
    }


_BUILT: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {}, {"pipeline_model_parallel_size": 4, "m": 8, "replicas": 1}),
    (
        {"schedule": "bitpipe"},
        {},
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 4,
            "pipeline_model_parallel_layout": "Ett|tt|tt|tt|tt|tt|tt|ttL",
            "overlap_p2p_comm": True,
            "replicas": 2,
            "m": 4,
        },
    ),
    (
        {"schedule": "interleaved", "chunks": 4},
        {},
        {
            "virtual_pipeline_model_parallel_size": 4,
            "pipeline_model_parallel_layout": None,
            "overlap_p2p_comm": False,
            "batch_p2p_comm": True,
        },
    ),
    (
        {},
        {"layout": "Et|" + "tt|" * 6 + "tttL"},
        {
            "virtual_pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": "Et|" + "tt|" * 6 + "tttL",
        },
    ),
    (
        {"schedule": "zb-v"},
        {"layout": "Et|" + "tt|" * 6 + "tttL"},
        {"pipeline_model_parallel_layout": "Et|" + "tt|" * 6 + "tttL"},
    ),
    (
        {"schedule": "1f1b"},
        {"num_layers": 10, "mtp_num_layers": 1},
        {"pipeline_model_parallel_layout": "Ettt|ttt|ttt|tmL"},
    ),
    ({}, {"pipeline_ranks": 1, "layout": "Et|" + "tt|" * 6 + "tttL"}, {"m": 8}),
    ({"dynamic": DynamicOrder()}, {"seed": 1}, {"pipeline_model_parallel_size": 4}),
    ({"transport": "shm", "checksums": True}, {"pipeline_ranks": 1}, {"m": 8}),
]

_REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"schedule": "zb-v"},
        {"pipeline_ranks": 1},
        "needs a pipeline of at least 2 ranks, not pipeline_ranks=1",
    ),
    (
        {"schedule": "bitpipe"},
        {"pipeline_ranks": 5},
        "must be even and at least 4; use pipeline_ranks=4 or",
    ),
    (
        {"schedule": "bitpipe"},
        {"num_microbatches": 7},
        "must be even for the two mirrored",
    ),
    (
        {"transport": "shm", "chunks": 2},
        {"num_microbatches": 6, "world_size": 8},
        "groups of pp = 4, so their number must be a multiple of 4; use num_microbatches=4 or 8",
    ),
    (
        {"schedule": "zb-v"},
        {"layout": "Et|tL"},
        "layout=Et|tL must have E once, t 16 times (num_layers)",
    ),
    ({"schedule": "zb-v"}, {"world_size": 6}, "world size 6 is not a multiple of"),
    ({"dynamic": DynamicOrder()}, {}, "need a seed; pass the same seed"),
    ({"disaggregation": megatron_ext.Disaggregation()}, {}, "both roles"),
    ({"device": "musa"}, {}, "device musa was requested after the cpu backend"),
]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any] | str]:
    """Result of each case. One process makes them all, one after the other."""
    cases = [(settings, sizes) for settings, sizes, _ in [*_BUILT, *_REFUSED]]
    [made] = run_ranks(1, configured, cases)
    return made


@pytest.mark.parametrize(
    "index", range(len(_BUILT)), ids=lambda index: str(_BUILT[index][0])
)
def test_what_to_build(found: list[dict[str, Any] | str], index: int) -> None:
    made = found[index]
    assert isinstance(made, dict), made
    assert made | _BUILT[index][2] == made


@pytest.mark.parametrize(
    "index", range(len(_REFUSED)), ids=lambda index: _REFUSED[index][2]
)
def test_what_cannot_be_is_refused(
    found: list[dict[str, Any] | str], index: int
) -> None:
    told = found[len(_BUILT) + index]
    assert isinstance(told, str), told
    assert _REFUSED[index][2] in told


USUAL = {"pipeline_ranks": 4, "num_microbatches": 8, "num_layers": 16}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pipeline_ranks": 4}, "pass num_microbatches, num_layers too"),
        ({"layout": "Et|tL"}, "pass pipeline_ranks, num_microbatches, num_layers too"),
        (
            {**USUAL, "pipeline_ranks": "4"},
            "pipeline_ranks '4' must be a whole number of at least",
        ),
        (
            {**USUAL, "num_layers": 0},
            "num_layers 0 must be a whole number of at least 1",
        ),
        ({**USUAL, "world_size": True}, "world_size True must be a whole number"),
        ({**USUAL, "seed": 1.5}, "seed 1.5 must be a whole number of at least 0"),
        ({**USUAL, "layout": ["Et", "tL"]}, "must be a string in Megatron's notation"),
    ],
)
def test_sizes_are_complete_and_possible(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        megatron_ext.configure(PipelineConfig(schedule="zb-v"), **sizes)
    assert active.active() is None


def test_arguments_are_those_of_the_signature() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'pp'"):
        megatron_ext.configure(PipelineConfig(), pp=4)  # type: ignore[call-overload]
    with pytest.raises(UserError, match="configure takes a PipelineConfig, not a dict"):
        megatron_ext.configure({"schedule": "zb-v"})  # type: ignore[call-overload]


def one_after_the_other() -> list[str]:
    """Tell which schedule Megatron hands out; its modules were imported before."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from torch import distributed

    from tests.patches.single import start_parallel

    start_parallel(pipeline_model_parallel_size=2)
    assert distributed.get_world_size() == 2
    found = [get_forward_backward_func().__module__]
    sizes = {"pipeline_ranks": 2, "num_microbatches": 4, "num_layers": 2}
    for end in (megatron_ext.deconfigure, megatron_ext.deactivate):
        megatron_ext.configure(PipelineConfig(schedule="zb-h1"), **sizes)
        found.append(get_forward_backward_func().__module__)
        end()
        found.append(get_forward_backward_func().__module__)
        assert active.active() is None
    return found


def test_it_ends_with_deconfigure_and_with_deactivate() -> None:
    own, ours = (
        "megatron.core.pipeline_parallel.schedules",
        "megatron_ext.runtime.entry",
    )
    assert run_ranks(2, one_after_the_other) == [[own, ours, own, ours, own]] * 2


def configured_and_parsed() -> list[str]:
    """Parse Megatron's flags while a program's configuration is in force, and after its end."""
    flags = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --lr 1e-3"
    flags += " --max-position-embeddings 16 --micro-batch-size 1 --train-iters 1"
    told = []
    for settings in ({"schedule": "zb-h1"}, {}):
        megatron_ext.configure(PipelineConfig(**settings), **USUAL)
        for _ in range(2):
            try:
                parse("gpt", flags.split())
            except UserError as error:
                told.append(str(error))
            else:
                told.append("")
            megatron_ext.deconfigure()
    return told


def test_megatrons_command_line_does_not_drop_what_a_program_configured() -> None:
    require_training()
    [told] = run_ranks(1, configured_and_parsed)
    assert ["select their schedule with flags" in line for line in told] == [
        True,
        False,
    ] * 2
    assert told[1::2] == ["", ""]


def built(settings: dict[str, Any]) -> list[str]:
    """Build what a framework's worker builds after `configure`; return each refusal, or ''."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    told = []
    for schedule, fields, of_gradients in settings["cases"]:
        megatron_ext.configure(
            PipelineConfig(**schedule),
            pipeline_ranks=2,
            num_microbatches=4,
            num_layers=4,
            seed=1,
            world_size=4,
        )
        usual = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 1}
        usual |= {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
        kind, of_both = TransformerConfig, usual
        if of_gradients:
            kind, of_both = DistributedDataParallelConfig, {}
        if not set(fields) <= set(kind.__dataclass_fields__):
            told.append("this release does not have it")
            continue
        try:
            kind(**{**of_both, **fields})
        except UserError as error:
            told.append(str(error))
        else:
            told.append("")
        megatron_ext.deconfigure()
    return told


_EXPERTS = {"num_moe_experts": 2, "add_bias_linear": False}
_SHARED = {
    **_EXPERTS,
    "moe_shared_expert_overlap": True,
    "moe_shared_expert_intermediate_size": 8,
    "moe_token_dispatcher_type": "alltoall",
}
_INSTANCES = {"num_distributed_optimizer_instances": 2, "overlap_grad_reduce": True}
_OVERLAP = {
    **_EXPERTS,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "overlap_moe_expert_parallel_comm": True,
    "bf16": True,
}
_PAIRS = {"schedule": "1f1b", "pairs": True}
_OFFLOAD = {"cpu_offloading": True, "cpu_offloading_num_layers": 1}
_BY_PROGRAMS: list[tuple[dict[str, Any], dict[str, Any], bool, str]] = [
    ({"schedule": "zb-h1"}, {}, False, ""),
    ({"schedule": "zb-h1"}, _SHARED, False, ""),
    (
        {"schedule": "1f1b"},
        {"defer_embedding_wgrad_compute": True, "gradient_accumulation_fusion": True},
        False,
        "cannot run with defer_embedding_wgrad_compute",
    ),
    ({"schedule": "zb-h1"}, _INSTANCES, True, ""),
    (
        {"schedule": "1f1b"},
        {"cuda_graph_impl": "local"},
        False,
        "cannot run with cuda_graph",
    ),
    (
        {"schedule": "zb-h1"},
        {**_EXPERTS, "use_transformer_engine_op_fuser": True},
        False,
        "use_transformer_engine_op_fuser with experts",
    ),
    ({"schedule": "zb-h1"}, {"use_transformer_engine_op_fuser": True}, False, ""),
    (
        {"schedule": "zb-v"},
        {"num_layers_in_first_pipeline_stage": 1},
        False,
        "cuts the model",
    ),
    (
        {"schedule": "zb-v"},
        {"num_layers_in_first_pipeline_stage": 1, "cuda_graph_impl": "local"},
        False,
        "remove them\nschedule=zb-v cannot run with num_layers_in_first",
    ),
    ({"schedule": "1f1b"}, {"num_layers_in_first_pipeline_stage": 1}, False, ""),
    (
        {"schedule": "1f1b", "variable_seq_lengths": True},
        {**_EXPERTS, "moe_token_dispatcher_type": "allgather"},
        False,
        "variable_seq_lengths cannot run with moe_token_dispatcher_type=allgather",
    ),
    (
        {"dynamic": DynamicOrder()},
        {**_EXPERTS, "moe_router_load_balancing_type": "global_aux_loss"},
        False,
        "dynamic cannot run with moe_router_load_balancing_type=global_aux_loss",
    ),
    (_PAIRS, _OVERLAP, False, ""),
    ({"dynamic": DynamicOrder(), "pairs": True}, _OVERLAP, False, ""),
    (_PAIRS, _EXPERTS, False, "1f1b has pairs=True, but the model"),
    (
        {"transport": "shm"},
        {"use_ring_exchange_p2p": True},
        False,
        "use_ring_exchange_p2p",
    ),
    ({"transport": "shm"}, {}, False, ""),
    ({}, {"cuda_graph_impl": "local"}, False, ""),
]
"""Settings, fields, whether they are those of gradients, and the refusal."""


def test_what_a_program_builds_is_checked_by_the_rules_of_flags() -> None:
    cases = [case[:3] for case in _BY_PROGRAMS]
    [told] = run_ranks(1, built, {"cases": cases})
    for (settings, fields, _, message), line in zip(_BY_PROGRAMS, told, strict=True):
        if line != "this release does not have it":
            assert (message in line) if message else not line, (
                f"{settings} {fields}: {line}"
            )


def mismatched() -> list[bool]:
    """Configure where the installed Megatron fits no patch; return what is left in force."""
    from megatron_ext.errors import UpstreamMismatch
    from megatron_ext.patches import drift
    from megatron_ext.patches.registry import REGISTRY

    def mismatch() -> None:
        raise drift.missing("a:b", "c")

    REGISTRY.raise_mismatches = mismatch  # type: ignore[method-assign]
    sizes = {"pipeline_ranks": 2, "num_microbatches": 4, "num_layers": 4}
    tracing = megatron_ext.Tracing(interval=1)
    with pytest.raises(UpstreamMismatch):
        megatron_ext.configure(
            PipelineConfig(schedule="zb-h1", tracing=tracing), **sizes
        )
    return [active.active() is None]


def test_a_megatron_that_does_not_fit_leaves_nothing_in_force() -> None:
    assert run_ranks(1, mismatched) == [[True]]


def _recomputing() -> tuple[list[Any], str]:
    import logging

    from megatron.core.transformer import TransformerConfig

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_ext").addHandler(handler)
    found: list[Any] = []
    for own, settings in (
        ({}, {}),
        ({}, RECOMPUTED),
        ({"stash_ratio": 3.0}, RECOMPUTED),
        ({"weights_at_once": True}, {}),
    ):
        megatron_ext.configure(
            PipelineConfig(schedule="zb-h1", **own),
            pipeline_ranks=2, num_microbatches=4, num_layers=4,
        )  # fmt: skip
        in_force = active.required()
        TransformerConfig(
            num_layers=4,
            hidden_size=8,
            num_attention_heads=2,
            transformer_impl="local",
            **settings,
        )
        assert active.required() is in_force
        pipeline = active.pipeline()
        assert pipeline is not None
        config = pipeline.config
        order = "".join(action.kind for action in pipeline.full.rows[1])
        found.append(
            (config.stash_ratio, config.weights_at_once, order.count("IW") == 4)
        )
    return found, "\n".join(lines)


def _in_slices_of_16_bits() -> bool:
    from megatron.core.transformer import TransformerConfig

    megatron_ext.configure(
        PipelineConfig(schedule="zb-h1", slices=2),
        pipeline_ranks=2, num_microbatches=4, num_layers=4,
    )  # fmt: skip
    config = TransformerConfig(
        num_layers=4,
        hidden_size=8,
        num_attention_heads=2,
        bf16=True,
        masked_softmax_fusion=True,
    )
    return config.masked_softmax_fusion


def test_a_program_with_layers_that_have_a_softmax_of_their_own_trains_in_slices() -> (
    None
):
    """Transformer Engine's; which layers a program builds, its configuration does not say."""
    assert run_ranks(1, _in_slices_of_16_bits) == [True]


RECOMPUTED = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip


def test_a_program_whose_model_recomputes_all_runs_w_right_after_i() -> None:
    [(found, told)] = run_ranks(1, _recomputing)
    assert found == [
        (1, False, False),
        (16, True, True),
        (3, False, False),
        (1, True, True),
    ]
    assert (
        told.count(
            "W runs right after I: all layers are recomputed, and W needs 16 times"
        )
        == 1
    )
