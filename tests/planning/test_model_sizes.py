"""Sizes of models from examples, flags and Hugging Face configurations."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megatron_ext.errors import ArgumentsError
from megatron_ext.planning.calibration import parts_of
from megatron_ext.planning.hardware import DEVICES, DeviceKind, kind_of, parse_devices
from megatron_ext.planning.layer_costs import Sharding, parameters, total
from megatron_ext.planning.model_flags import sizes_of_flags
from megatron_ext.planning.model_source import read_model

if TYPE_CHECKING:
    from megatron_ext.planning.model_sizes import ModelSizes

EXAMPLES = Path(__file__).parents[2] / "examples"


def billions(model: ModelSizes) -> tuple[float, float]:
    """All weights, and those of a token."""
    whole, active = parameters(model, DEVICES["h100"])
    return whole / 1e9, active / 1e9


@pytest.mark.parametrize(
    ("folder", "size", "published"),
    [  # as published: 671B, 235.7B, 8.03B, 70.55B, 46.7B
        ("deepseek-v3", None, 671.03),
        ("deepseek-v2", None, 235.74),
        ("llama3", "8b", 8.03),
        ("llama3", "70b", 70.55),
        ("mixtral", None, 46.70),
    ],
)
def test_an_example_has_the_published_number_of_parameters(
    folder: str, size: str | None, published: float
) -> None:
    model = read_model(EXAMPLES / folder, size, [])
    assert billions(model)[0] == pytest.approx(published, abs=0.011)


def test_operations_are_counted_as_megatron_counts_them() -> None:
    """Megatron-Bridge publishes both rates of a run: 734 TFLOP/s at 1,633 tokens/s, 8k tokens."""
    for example, size, sequence, of_token in (
        ("llama3", "70b", 8192, 734e12 / 1633),
        ("deepseek-v3", None, 4096, 1276e12 / 4912),
    ):
        by = Sharding(sequence=sequence)
        layers, *ends = parts_of(
            read_model(EXAMPLES / example, size, []), by, DEVICES["h100"]
        )
        operations = 3 * total([*layers, *ends]).operations
        assert operations / sequence == pytest.approx(of_token, rel=0.005)


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168,
    "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
    "vocab_size": 129280, "tie_word_embeddings": False, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "num_nextn_predict_layers": 1, "max_position_embeddings": 163840,
}  # fmt: skip


def test_a_hugging_face_config_gives_the_sizes_of_the_example(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    ours, theirs = (
        read_model(EXAMPLES / "deepseek-v3", None, []),
        read_model(tmp_path, None, []),
    )
    for name in set(vars(ours)) - {"name", "flags", "sequence"}:
        assert getattr(ours, name) == getattr(theirs, name), name


def test_a_hybrid_of_mamba_and_latent_experts_has_the_published_parameters(
    tmp_path: Path,
) -> None:
    """Nemotron 3 Super: 120.6B without multi-token prediction."""
    config = {
        "model_type": "nemotron_h", "hidden_size": 4096, "num_hidden_layers": 88,
        "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
        "EMEMEMEMEM*EMEMEMEM*EMEMEMEME", "num_attention_heads": 32, "num_key_value_heads": 2,
        "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128,
        "n_groups": 8, "n_routed_experts": 512, "num_experts_per_tok": 22, "vocab_size": 131072,
        "moe_intermediate_size": 2688, "moe_latent_size": 1024, "intermediate_size": 2688,
        "moe_shared_expert_intermediate_size": 5376,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model(tmp_path, None, [])
    assert (model.num_layers, model.kinds.count("mamba"), model.gated) == (
        88,
        40,
        False,
    )
    assert billions(model)[0] == pytest.approx(120.6, abs=0.1)


LLAMA_4 = {
    "model_type": "llama4", "text_config": {
        "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_experts_per_tok": 1,
        "vocab_size": 202048, "tie_word_embeddings": False, "hidden_act": "silu",
    },
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], float, float]] = {
    "Llama 4 Maverick": (
        {"num_local_experts": 128, "interleave_moe_layer_step": 2},
        400.7, 17.2,
    ),
    "Llama 4 Scout": ({"num_local_experts": 16, "interleave_moe_layer_step": 1}, 107.8, 17.2),
    "Kimi K2": (
        {
            **DEEPSEEK_V3, "model_type": "kimi_k2", "num_attention_heads": 64,
            "num_key_value_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1,
            "vocab_size": 163840, "num_nextn_predict_layers": 0,
        },
        1026.4, 32.9,
    ),
    "Qwen3 235B": (
        {
            "model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94,
            "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
            "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128,
            "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "vocab_size": 151936, "tie_word_embeddings": False, "hidden_act": "silu",
            "sliding_window": None,
        },
        235.1, 22.2,
    ),
    "GPT-OSS 120B": (
        {
            "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4,
            "vocab_size": 201088, "tie_word_embeddings": False, "attention_bias": True,
            "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18,
        },
        116.83, 5.71,
    ),
    "Gemma 2 9B": (
        {
            "model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
            "intermediate_size": 14336, "vocab_size": 256000, "sliding_window": 4096,
            "hidden_act": "gelu_pytorch_tanh",
        },
        9.24, 9.24,
    ),
    "Phi-2": (
        {
            "model_type": "phi", "hidden_size": 2560, "num_hidden_layers": 32,
            "num_attention_heads": 32, "intermediate_size": 10240, "vocab_size": 51200,
            "hidden_act": "gelu_new", "tie_word_embeddings": False,
        },
        2.78, 2.78,
    ),
    "Nemotron 4 340B": (
        {
            "model_type": "nemotron", "hidden_size": 18432, "num_hidden_layers": 96,
            "num_attention_heads": 96, "num_key_value_heads": 8, "intermediate_size": 73728,
            "vocab_size": 256000, "hidden_act": "relu2", "tie_word_embeddings": False,
        },
        341.0, 341.0,
    ),
}  # fmt: skip


def model_of(folder: Path, config: dict[str, Any]) -> ModelSizes:
    (folder / "config.json").write_text(json.dumps(config))
    return read_model(folder, None, [])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_hugging_face_config_has_the_published_number_of_parameters(
    tmp_path: Path, name: str
) -> None:
    config, whole, active = PUBLISHED[name]
    if name.startswith("Llama 4"):
        config = {**LLAMA_4, "text_config": {**LLAMA_4["text_config"], **config}}
    assert billions(model_of(tmp_path, config)) == pytest.approx(
        (whole, active), rel=0.002
    )


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({}, 0.5),
        ({"layer_types": None}, 0.5),
        ({"layer_types": None, "sliding_window_pattern": 6}, 5 / 6),
        ({"layer_types": ["sliding_attention"] * 35 + ["full_attention"]}, 35 / 36),
        ({"use_sliding_window": False}, 0),
    ],
)
def test_a_hugging_face_config_gives_the_windows(
    tmp_path: Path, changes: dict[str, Any], share: float
) -> None:
    model = model_of(tmp_path, {**PUBLISHED["GPT-OSS 120B"][0], **changes})
    assert model.window_share == pytest.approx(share)
    assert model.window == (128 if share else 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 0}, "--num-attention-heads is missing; give the size"),
        (
            {"num_key_value_heads": 5},
            "--num-query-groups 5 does not divide 64, which Megatron",
        ),
        (
            {"head_dim": None, "num_attention_heads": 60},
            "heads 60 does not divide 4096, which",
        ),
        (
            {"num_experts_per_tok": 200},
            "--moe-router-topk 200 is more than 128, which Megatron",
        ),
        (
            {"text_config": {"linear_num_value_heads": 32}},
            "does not support linear attention",
        ),
    ],
)
def test_a_config_that_describes_no_model_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentsError, match=message) as caught:
        model_of(tmp_path, {**PUBLISHED["Qwen3 235B"][0], **changes})
    assert "\n" not in str(caught.value)


def test_windows_are_read_as_megatron_takes_them() -> None:
    flags = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 128 --window-size"
    for words, share in (
        ("128,0", 1),
        ("128,0 --window-attn-skip-freq 3", 0.75),
        ("(-1,0)", 0),  # a whole one
        ("128,0 --window-attn-skip-freq ([1]*1+[0]*3)", 0.25),
    ):
        assert (
            sizes_of_flags([*flags.split(), *words.split()], "").window_share == share
        )
    with pytest.raises(
        ArgumentsError, match="--window-size wide is not a window; give the tokens"
    ):
        sizes_of_flags([*flags.split(), "wide"], "")
    with pytest.raises(
        ArgumentsError, match="--window-attn-skip-freq 0 does not describe 4"
    ):
        sizes_of_flags([*flags.split(), "128,0", "--window-attn-skip-freq", "0"], "")


def test_a_hybrid_pattern_has_the_layers_of_multi_token_prediction() -> None:
    flags = "--hidden-size 64 --num-attention-heads 4 --vocab-size 128 --hybrid-layer-pattern"
    model = sizes_of_flags([*flags.split(), "M*|M-/*-/*-"], "")
    assert (model.num_layers, model.mtp_layers) == (4, 2)
    assert sizes_of_flags([*flags.split(), "M*M-"], "").mtp_layers == 0


def test_a_flag_whose_value_is_empty_is_left_out() -> None:
    flags = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 128 --seq-length"
    assert sizes_of_flags([*flags.split(), ""], "").sequence is None


def test_flags_win_over_the_source(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    flags = ["--num-layers", "6", "--moe-layer-freq", "2", "--seq-length", "512"]
    model = read_model(tmp_path, None, flags)
    assert model.moe_layers == (True, False) * 3
    assert model.sequence == 512


@pytest.mark.parametrize(
    ("source", "size", "flags", "message"),
    [
        (None, None, [], "no model is given; use --model examples/llama3"),
        (None, None, ["--num-layers", "4"], "--hidden-size is missing; give the size"),
        (None, None, ["--num-layers", "four"], "give a whole number"),
        (
            "llama3",
            "9b",
            [],
            "--size 9b: .* has 8b 70b tiny|--size 9b: .* has .*8b.*; use one",
        ),
        ("nowhere", None, [], "nowhere does not exist; use an example in a clone"),
        (
            "llama3",
            "8b",
            ["--num-experts", "4", "--moe-layer-freq", "[1]*3"],
            "32 layers; use",
        ),
        (
            "llama3",
            "8b",
            ["--num-experts", "4", "--moe-layer-freq", "open('x')"],
            "32 layers",
        ),
    ],
)
def test_bad_input_is_one_line(
    source: str | None, size: str | None, flags: list[str], message: str
) -> None:
    path = None if source is None else EXAMPLES / source
    with pytest.raises(ArgumentsError, match=message) as caught:
        read_model(path, size, flags)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("peft_type", "has peft_type: the planner does not support an adapter"),
        (
            "compress_ratios",
            "does not support compressed attention .DeepSeek-V4.; instead",
        ),
    ],
)
def test_models_that_no_formula_covers_are_refused(
    tmp_path: Path, key: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**DEEPSEEK_V3, key: [4]}))
    with pytest.raises(ArgumentsError, match=message):
        read_model(tmp_path, None, [])
    with pytest.raises(
        ArgumentsError, match="--experimental-attention-variant: the planner does"
    ):
        read_model(
            EXAMPLES / "llama3", None, ["--experimental-attention-variant", "dsa"]
        )


def test_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_devices("8xH100") == (8, DEVICES["h100"])
    Path("mine.json").write_text(json.dumps({"base": "h100", "memory_gib": 64.0}))
    count, mine = parse_devices("64xmine.json")
    assert (count, mine.name, mine.memory_gib) == (64, "mine", 64.0)
    assert mine.flops == DEVICES["h100"].flops
    assert mine.sources["memory_gib"] == "given by mine.json"
    Path("free.json").write_text('{"base": "cpu", "overlap": 0}')
    assert parse_devices("1xfree.json")[1].overlap == 0
    Path("bad.json").write_text('{"base": "h100", "speed": 1}')
    for name, content in (
        ("word", '"x"'),
        ("none", "0"),
        ("less", "-1"),
        ("endless", "1e400"),
    ):
        Path(f"{name}.json").write_text(f'{{"base": "h100", "gemm": {content}}}')
    for text, message in (
        ("h100", "is not a number and a kind"),
        ("0xh100", "is not a number and a kind"),
        ("8xh900", "h900 is unknown; use h100"),
        ("8xbad.json", "does not describe a device"),
        ("8xmissing.json", "does not describe a device"),
        ("8xword.json", "gemm is 'x', not a positive number"),
        ("8xnone.json", "gemm is 0, not a positive number"),
        ("8xless.json", "gemm is -1, not a positive number"),
        ("8xendless.json", "gemm is inf, not a positive number"),
    ):
        with pytest.raises(ArgumentsError, match=message):
            parse_devices(text)


def test_every_number_of_a_device_has_a_source() -> None:
    others = {"name", "measured", "seconds", "sources"}
    numbers = {each.name for each in fields(DeviceKind)} - others
    for device in DEVICES.values():
        assert numbers <= set(device.sources), device.name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
    ],
)
def test_the_name_that_a_driver_shows_gives_the_kind(name: str, kind: str) -> None:
    assert kind_of(name) is DEVICES[kind]
    assert kind_of("NVIDIA A10") is None


def test_a_precision_that_a_device_lacks_is_an_error() -> None:
    assert DEVICES["b200"].peak("nvfp4") > DEVICES["b200"].peak("mxfp8")
    with pytest.raises(ArgumentsError, match="h100 has no 4-bit matrix products; use"):
        DEVICES["h100"].product_rate("nvfp4")
