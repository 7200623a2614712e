"""Corrects the planner's costs with measurements of individual layers or with a trace.

`plan --calibrate` needs one device and takes a few minutes. Megatron builds each type of layer in
the model with random weights, both on its own and together with the embedding or the loss, and this
module times the passes. To time the input gradient separately, the weights are set not to require
gradients. The rest of the full backward pass is attributed to the weight gradient.
`plan --trace-dir` uses the times from a traced run instead.
"""

# ruff: noqa: T201 - commands report on stdout and stderr

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext import devices
from megatron_ext.errors import ArgumentsError, DataError
from megatron_ext.files import cannot_write, write_text
from megatron_ext.planning.calibration import Passes, computation, factors
from megatron_ext.planning.hardware import DEVICES, kind_of, parse_devices
from megatron_ext.planning.layer_costs import Sharding
from megatron_ext.planning.model_source import read_model
from megatron_ext.schedules.table.cuts import parse_layout
from megatron_ext.text_table import aligned
from megatron_ext.tools.schedule_commands import refuse_others

if TYPE_CHECKING:
    from megatron_ext.planning.hardware import DeviceKind
    from megatron_ext.planning.layer_costs import Part
    from megatron_ext.planning.model_sizes import LayerKind, ModelSizes
    from megatron_ext.schedules.table.actions import Schedule
    from megatron_ext.tools.trace.aggregate import Run

_MOST_EXPERTS = 8
"""Maximum number of experts to build on one device. More experts would only use more memory,
because the number of tokens per expert would not change."""
_LEAST_REPEATS = 5
_ENOUGH_S = 3.0
_GIVES = ("calibrate", "model", "size", "devices", "seq_length", "fix")


def run(args: argparse.Namespace) -> int:
    """Measure a model's layers and write the results to a device file."""
    refuse_others(
        args,
        _GIVES,
        "--calibrate only measures layers, so {} has no effect; remove it",
    )
    path = Path(args.calibrate)
    if path.suffix != ".json":
        raise ArgumentsError(f"--calibrate {path}: unknown file type; use .json")
    model = read_model(args.model, args.size, args.model_flags)
    sharding = _sharding(args, model)
    model = replace(
        model,
        # MTP layers use the factors for their kind of layer (`planning/calibration.py`).
        mtp_layers=0,
        num_experts=min(model.num_experts, _MOST_EXPERTS),
        top_k=min(model.top_k, _MOST_EXPERTS),
    )
    # Measure the layers and compare the times with the formula's for the described
    # device.
    name, memory_gib = devices.name_and_memory()
    described = _described(name, args.devices)
    seconds = measure(model, sharding)
    formula: dict[str, Part] = {}
    for part in seconds:
        formula[part] = computation(model, part, sharding, described, frozenset())
    ratios_by_part = dict(factors(seconds, formula))
    print(_report(seconds, ratios_by_part))
    # The device file references the device's description and contains only the
    # differences.
    content: dict[str, Any] = {"base": described.name}
    if memory_gib is not None:
        content["memory_gib"] = round(memory_gib, 1)
    content["measured"] = {
        part: list(ratios) for part, ratios in ratios_by_part.items()
    }
    content["seconds"] = {part: list(passes) for part, passes in seconds.items()}
    today = time.strftime("%Y-%m-%d", time.gmtime())
    shape = f"{sharding.micro_batch} x {sharding.sequence} tokens"
    content["sources"] = {
        "measured": f"{today} on {name}, {model.name}, {shape}: plan --calibrate"
    }
    try:
        text = json.dumps(content, indent=1)
        write_text(path, text + "\n")
    except OSError as error:
        raise ArgumentsError(
            cannot_write(path, error, "give another --calibrate")
        ) from error
    print(f"\nto plan with it, use --devices 64x{path}")
    return 0


def _sharding(args: argparse.Namespace, model: ModelSizes) -> Sharding:
    """Return the sharding to measure, which keeps everything on one device."""
    sequence = args.seq_length or model.sequence
    if sequence is None or not 0 < sequence < 10**9:
        raise ArgumentsError(
            f"--seq-length is {sequence or 'missing'}; add, for example, --seq-length 4096"
        )
    assignment = args.fix or "micro_batch=1"
    key, _, number = assignment.partition("=")
    if key != "micro_batch" or not number.isdecimal() or not int(number):
        raise ArgumentsError(
            f"--fix {args.fix}: --calibrate accepts only micro_batch; use --fix micro_batch=2"
        )
    return Sharding(micro_batch=int(number), sequence=sequence)


def _described(name: str, devices: str | None) -> DeviceKind:
    """Return the description to correct: this device's or the most similar device's.

    Raises:
        ArgumentsError: This device has no description, and the user did not name one.
    """
    if devices is None:
        kind = kind_of(name)
    else:
        _, kind = parse_devices(devices)
    if kind is None or kind.name not in DEVICES:
        raise ArgumentsError(
            f"the planner has no description of {name}; pass the most similar device as "
            f"--devices 1xKIND, where KIND is one of {', '.join(DEVICES)}"
        )
    return kind


def _report(
    seconds: Mapping[str, Passes], ratios_by_part: Mapping[str, Sequence[float]]
) -> str:
    """Return the measurements as a table."""
    rows = [["part", "forward ms", "input ms", "weight ms", "of the description's"]]
    for part, ratios in ratios_by_part.items():
        times_ms = [f"{1e3 * time_s:.3f}" for time_s in seconds[part]]
        ratios_text = " ".join(f"{ratio:.2f}" for ratio in ratios)
        rows.append([part, *times_ms, ratios_text])
    return aligned(rows)


def measure(model: ModelSizes, sharding: Sharding) -> dict[str, Passes]:
    """Return the seconds per pass through each part of a model, on this process's device.

    Args:
        model: Sizes of the model. All of its experts are on this device.
        sharding: Number and length of the sequences.

    Raises:
        ArgumentsError: The model has a kind of layer that cannot be built here.
    """
    kinds = set(model.kinds)
    if not kinds <= {"dense", "moe"}:
        raise ArgumentsError(
            "--calibrate can only build layers of attention and a feed-forward network, but "
            f"{model.name} has other layers; remove --calibrate"
        )
    with _Bench(model, sharding) as bench:
        measured: dict[str, Passes] = {}
        for kind in sorted(kinds):
            measured[kind] = bench.passes(kind)
        # Any kind of layer will do, because its time is subtracted.
        any_kind = min(kinds)
        layer = measured[any_kind]
        with_embedding = bench.passes(any_kind, pre=True)
        with_loss = bench.passes(any_kind, post=True)
    embedding = _beyond(with_embedding, layer)
    # A model with the embedding has no input gradient, so its backward pass was
    # measured as a whole. Subtract the layer's input gradient as well. The formula
    # counts the embedding's backward pass as input gradient.
    backward_s = max(0.0, embedding.input + embedding.weight - layer.input)
    measured["embedding"] = Passes(embedding.forward, backward_s, 0.0)
    measured["loss"] = _beyond(with_loss, layer)
    return measured


def _beyond(together: Passes, layer: Passes) -> Passes:
    """Return the time for the embedding or loss, which was timed together with a layer."""
    extra_s = []
    for both_s, layer_s in _by_pass(together, layer):
        # The time of the embedding or the loss may be smaller than the measurement
        # noise.
        extra_s.append(max(0.0, both_s - layer_s))
    return Passes(*extra_s)


class _Bench:
    """Builds and times one-layer Megatron models in a world of one process."""

    def __init__(self, model: ModelSizes, sharding: Sharding) -> None:
        self.model = model
        self.sharding = sharding

    def __enter__(self) -> _Bench:
        # Megatron must not be imported before this call.
        self.device = devices.current()
        import torch
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        self.device.bind(0)
        # An in-memory store needs no port.
        torch.distributed.init_process_group(
            self.device.distributed_backend, store=torch.distributed.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
        )  # fmt: skip
        parallel_state.initialize_model_parallel()
        # On a GPU, Megatron initializes weights with generators that this call creates.
        model_parallel_cuda_manual_seed(1)
        return self

    def __exit__(self, *_: object) -> None:
        import torch
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()

    def _built(self, kind: str, *, pre: bool, post: bool) -> Any:
        import torch
        from megatron.core.models.gpt import GPTModel, gpt_layer_specs
        from megatron.core.transformer import MLATransformerConfig, TransformerConfig
        from torch.nn import functional

        on_host = self.device.name == "cpu"
        model = self.model
        # On a GPU, training uses Transformer Engine if it is installed.
        has_te = gpt_layer_specs.HAVE_TE and not on_host
        num_experts = None
        if kind == "moe":
            num_experts = model.num_experts
        dtype = torch.bfloat16
        if on_host:
            dtype = torch.float32
        activation: Callable[..., Any] = functional.gelu
        if model.gated:
            activation = functional.silu
        norm = "LayerNorm"
        if model.norm_weights == 1:
            norm = "RMSNorm"
        position_embedding = "rope"
        if model.learned_positions:
            position_embedding = "learned_absolute"
        settings: dict[str, Any] = {
            "num_layers": 1,
            "hidden_size": model.hidden,
            "num_attention_heads": model.heads,
            "ffn_hidden_size": model.ffn,
            "gated_linear_unit": model.gated,
            "activation_func": activation,
            "normalization": norm,
            "add_bias_linear": model.biases,
            "add_qkv_bias": model.qkv_biases and not model.biases,
            "qk_layernorm": model.qk_norm,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "use_cpu_initialization": on_host,
            "bf16": not on_host,
            "params_dtype": dtype,
            # The fused kernels add to Megatron's gradient buffers, which exist only with DDP.
            "gradient_accumulation_fusion": False,
            # Use the same fusions as training with default flags.
            "bias_dropout_fusion": not on_host,
            "bias_activation_fusion": not on_host and (model.gated or model.biases),
            "apply_rope_fusion": has_te and not model.is_latent,
            **self._attention_settings(),
        }
        if num_experts is not None:
            settings |= self._expert_settings(num_experts, grouped=not on_host)
        config_class = MLATransformerConfig if model.is_latent else TransformerConfig
        options = {
            "num_experts": num_experts,
            "qk_layernorm": model.qk_norm,
            "multi_latent_attention": model.is_latent,
        }
        if has_te:
            spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
                moe_grouped_gemm=bool(num_experts), **options
            )
        else:
            spec = gpt_layer_specs.get_gpt_layer_local_spec(
                normalization=settings["normalization"], **options
            )
        built = GPTModel(
            config_class(**settings),
            spec,
            model.vocabulary,
            self.sharding.sequence,
            pre_process=pre,
            post_process=post,
            position_embedding_type=position_embedding,
        )
        return built.to(device=self.device.torch_device(), dtype=dtype)

    def _attention_settings(self) -> dict[str, Any]:
        model = self.model
        if not model.is_latent:
            return {
                "num_query_groups": model.query_groups,
                "kv_channels": model.head_size,
            }
        return {
            "q_lora_rank": model.query_rank or None,
            "kv_lora_rank": model.key_value_rank,
            "qk_head_dim": model.head_size - model.rotary_size,
            "qk_pos_emb_head_dim": model.rotary_size,
            "v_head_dim": model.value_size,
            "rope_type": "rope",
        }

    def _expert_settings(self, num_experts: int, *, grouped: bool) -> dict[str, Any]:
        model = self.model
        return {
            "num_moe_experts": num_experts,
            "moe_router_topk": model.top_k,
            "moe_ffn_hidden_size": model.expert_ffn,
            "moe_shared_expert_intermediate_size": model.shared_ffn or None,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "moe_grouped_gemm": grouped,
        }

    def passes(self, kind: str, *, pre: bool = False, post: bool = False) -> Passes:
        """Return the shortest time per pass through a layer, optionally with one end of the model.

        `pre` adds the embedding to the layer, and `post` adds the loss.
        """
        import torch

        built = self._built(kind, pre=pre, post=post)
        sequence = self.sharding.sequence
        torch_device = self.device.torch_device()
        shape = self.sharding.micro_batch, sequence
        tokens = torch.randint(self.model.vocabulary, shape, device=torch_device)
        positions = torch.arange(sequence, device=torch_device).expand(*shape)
        mask_shape = 1, 1, sequence, sequence
        mask = torch.ones(*mask_shape, dtype=torch.bool, device=torch_device)
        mask = mask.triu(1)
        any_weight = next(built.parameters())
        hidden = torch.randn(
            sequence,
            self.sharding.micro_batch,
            self.model.hidden,
            device=torch_device,
            requires_grad=True,
            dtype=any_weight.dtype,
        )

        def forward() -> Any:
            if not pre:
                built.set_input_tensor(hidden)
            if not post:
                return built(tokens, positions, mask, labels=None)
            # The model returns one loss per token. Megatron's loss function sums them
            # in float32.
            losses = built(tokens, positions, mask, labels=tokens)
            return losses.float().mean()

        def timed(run: Callable[[], Any]) -> tuple[float, Any]:
            # Kernels run asynchronously, so wait for earlier ones before starting the
            # clock.
            self.device.synchronize()
            begin_s = time.perf_counter()
            result = run()
            self.device.synchronize()
            return time.perf_counter() - begin_s, result

        # Megatron adds the embedding's gradient to its buffer with a separate kernel, which is part
        # of the embedding's cost.
        table: Any = None
        buffer: Any = None
        if pre:
            table = built.embedding.word_embeddings.weight
            buffer = torch.zeros_like(table, dtype=torch.float32)

        def backward(out: Any) -> float:
            gradient = None if post else torch.ones_like(out)
            # Otherwise, this pass would accumulate into the previous pass's input
            # gradient.
            hidden.grad = None

            def run() -> None:
                out.backward(gradient)
                if pre:
                    buffer.add_(table.grad)
                    table.grad = None

            backward_s, _ = timed(run)
            return backward_s

        forwards = []
        wholes = []
        inputs = []
        until_s = time.perf_counter() + _ENOUGH_S
        number = 0
        while number <= _LEAST_REPEATS or time.perf_counter() < until_s:
            built.requires_grad_(True)
            forward_s, out = timed(forward)
            whole_s = backward(out)
            input_s = 0.0
            if not pre:
                # If the weights require no gradients, the backward pass computes only
                # the input gradient.
                built.requires_grad_(False)
                input_s = backward(forward())
            # The first run includes allocation and compilation.
            if number:
                forwards.append(forward_s)
                wholes.append(whole_s)
                inputs.append(input_s)
            number += 1
        # Use the shortest times, because other work on the machine can only increase
        # them.
        input_s = min(inputs)
        weight_s = max(0.0, min(wholes) - input_s)
        return Passes(min(forwards), input_s, weight_s)


def of_trace(
    directory: Path, model: ModelSizes, device: DeviceKind
) -> tuple[tuple[str, Passes], ...]:
    """Return correction factors for a device's costs, derived from a traced run of the model.

    The factors for every kind of layer come from the stages between the first and the last, or from
    all stages if there are only two. The embedding and the loss are assigned the remaining time of
    their stages. An unsplit backward pass is divided in the same ratio as in the formula.

    Raises:
        DataError: The trace has no pipeline or comes from a different model.
    """
    from megatron_ext.tools.trace.aggregate import read_run
    from megatron_ext.tools.trace.measured_costs import measured_costs

    run = read_run(directory)
    schedule = run.schedule
    if schedule is None:
        raise DataError(
            f"{directory} has no schedule.json; trace a run that uses a pipeline"
        )
    sharding = _sharding_of(run, model)
    kinds_of_stages = _kinds_of_stages(run, schedule, model)
    times = measured_costs(run, schedule).stages
    num_stages = schedule.num_stages
    ends = {"embedding": 0, "loss": num_stages - 1}
    costs: dict[str, Part] = {}
    formula: dict[str, Passes] = {}
    for name in (*dict.fromkeys(model.kinds), *ends):
        part = computation(model, name, sharding, device, frozenset())
        costs[name] = part
        formula[name] = Passes(part.forward, part.input, part.weight)

    # Scale all kinds of layers by the same factors, taken from stages that contain only layers.
    has_middle = num_stages > 2
    middle = range(1, num_stages - 1) if has_middle else range(num_stages)
    parts: list[str] = []
    for stage in middle:
        parts += kinds_of_stages[stage]
    if not has_middle:
        parts += ends
    # Compare these stages' traced time with the formula's.
    by_formula = _sum([formula[name] for name in parts])
    by_trace = _sum([times[stage] for stage in middle])
    if not schedule.splits_backward:
        by_trace = _split_like(by_trace, by_formula)
    measured = _scaled(formula, by_trace, by_formula)
    if not has_middle:
        return factors(measured, costs)

    # The embedding and the loss are assigned the time that their stages take beyond the
    # layers' time.
    for name, stage in ends.items():
        layers = _sum([measured[kind] for kind in kinds_of_stages[stage]])
        end_s = []
        for stage_s, layer_s in _by_pass(times[stage], layers):
            end_s.append(stage_s - layer_s)
        end = Passes(*end_s)
        if not schedule.splits_backward:
            end = _split_like(end, formula[name])
        # Layers in an end stage may be faster than those in the middle, which leaves no time for
        # the embedding or the loss.
        end_s = [max(0.0, time_s) for time_s in end]
        measured[name] = Passes(*end_s)
    return factors(measured, costs)


def _scaled(
    formula: Mapping[str, Passes], by_trace: Passes, by_formula: Passes
) -> dict[str, Passes]:
    """Return the times of each part's passes, scaled by the ratio of the trace to the formula."""
    ratios = [time_s / cost_s for time_s, cost_s in _by_pass(by_trace, by_formula)]
    scaled: dict[str, Passes] = {}
    for name, passes in formula.items():
        scaled_s = [cost_s * ratio for cost_s, ratio in _by_pass(passes, ratios)]
        scaled[name] = Passes(*scaled_s)
    return scaled


def _by_pass(
    passes: Sequence[float], reference: Sequence[float]
) -> Iterator[tuple[float, float]]:
    return zip(passes, reference, strict=True)


def _sharding_of(run: Run, model: ModelSizes) -> Sharding:
    """Return how a run sharded the model.

    Raises:
        DataError: The run trained a different model or used settings that hide the cost of layers.
    """
    settings = run.settings
    sizes = {"num_layers": model.num_layers, "hidden_size": model.hidden}
    for name, size in sizes.items():
        if settings.get(name) not in (None, size):
            raise DataError(
                f"{run.directory} contains traces of a model with {name} {settings[name]} instead "
                f"of {size}; use that model's flags"
            )
    if "recompute_granularity" in settings:
        raise DataError(
            f"{run.directory} was traced with recomputation, which hides the cost of layers; trace "
            "a run without --recompute-granularity"
        )
    return Sharding(
        tensor=int(settings.get("tensor_model_parallel_size", 1)),
        context=int(settings.get("context_parallel_size", 1)),
        expert=int(settings.get("expert_model_parallel_size", 1)),
        micro_batch=int(settings.get("micro_batch_size", 1)),
        sequence=int(settings.get("seq_length", model.sequence or 0)),
    )


def _kinds_of_stages(
    run: Run, schedule: Schedule, model: ModelSizes
) -> list[tuple[LayerKind, ...]]:
    """Return the kinds of layers in each stage.

    Raises:
        DataError: The number of layers in each stage is unknown.
    """
    num_stages = schedule.num_stages
    layout = run.settings.get("pipeline_model_parallel_layout")
    counts = [model.num_layers // num_stages] * num_stages
    if layout is not None:
        stages = parse_layout(str(layout))
        counts = [stage.count("t") for stage in stages]
    if len(counts) != num_stages or sum(counts) != model.num_layers:
        raise DataError(
            f"{run.directory} does not say how many layers each of its {num_stages} stages has"
        )
    bounds = accumulate(counts, initial=0)
    return [model.kinds[first:end] for first, end in pairwise(bounds)]


def _split_like(passes: Passes, formula: Passes) -> Passes:
    """Divide the time of an unsplit backward pass in the same ratio as in the formula."""
    backward_s = passes.input + passes.weight
    backward_cost_s = formula.input + formula.weight
    share = backward_s / backward_cost_s
    return passes._replace(
        input=share * formula.input,
        weight=share * formula.weight,
    )


def _sum(parts: Sequence[tuple[float, float, float]]) -> Passes:
    """Return the sum per pass; an end stage without layers has no parts."""
    forward_s = 0.0
    input_s = 0.0
    weight_s = 0.0
    for part_forward_s, part_input_s, part_weight_s in parts:
        forward_s += part_forward_s
        input_s += part_input_s
        weight_s += part_weight_s
    return Passes(forward_s, input_s, weight_s)
