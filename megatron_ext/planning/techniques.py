"""Techniques that speed up a given model, as requested by Megatron's flags."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_ext.errors import ArgumentsError

Precision = Literal["bf16", "fp8", "mxfp8", "nvfp4"]
Graphs = Literal["auto", "none", "router", "mamba", "layers", "step"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp8", "mxfp8", "nvfp4")
_SWITCHES = (
    "use-transformer-engine-op-fuser overlap-moe-expert-parallel-comm "
    "disable-tp-comm-overlap-ag fp8-dot-product-attention fp8-output-proj grad-reduce-in-bf16 "
    "no-gradient-accumulation-fusion fp8-param-gather fp4-param-gather"
)
_VALUED = {
    "transformer_impl": "--transformer-impl",
    "moe_token_dispatcher_type": "--moe-token-dispatcher-type",
    "cross_entropy_fusion_impl": "--cross-entropy-fusion-impl",
    "fp8": "--fp8-format",
    "fp8_recipe": "--fp8-recipe",
    "fp4": "--fp4-format",
}
"""Name of a Megatron argument -> the flag, which takes a value."""
_EXPERT_KINDS = frozenset({"moe", "experts"})


@dataclass(frozen=True, kw_only=True)
class Techniques:
    """How a layer's GEMMs, kernel launches and messages run."""

    precision: Precision = "bf16"
    """Precision of the GEMMs in layers. `fp8` is scaled per tensor, `mxfp8` and `nvfp4` per
    block."""
    attends_in_8bit: bool = False
    """Whether attention computes in 8 bits, too."""
    outputs_in_8bit: bool = False
    """Whether the output layer computes in 8 bits, too. Requires `mxfp8`."""
    loses_in_place: bool = False
    """Whether Transformer Engine computes a fused loss, which overwrites the logits with their
    gradients."""
    graphs: Graphs = "none"
    """CUDA graphs: `router` covers only the router and shared experts, `mamba` only Mamba layers,
    `layers` everything except the experts, and `step` everything. `auto` means `layers` if Megatron
    and the schedule support it, otherwise `none`."""
    fuses_experts: bool = False
    """Whether a single kernel computes all experts' GEMMs, activation and quantization."""
    sends_once: bool = False
    """Whether a token is sent once to every rank and node that has its experts (dispatcher `flex`)
    instead of once per expert."""
    overlaps_experts: bool = False
    """Whether all-to-all overlaps with another micro-batch's computation."""
    overlaps_tensor: bool = False
    """Whether tensor-parallel gathers and scatters overlap with GEMMs."""
    is_local: bool = False
    """Whether layers are Megatron's own instead of Transformer Engine's. The planner assumes that
    both take the same time."""
    fuses_gradients: bool = True
    """Whether GEMMs add weight gradients to Megatron's buffers, except for the embedding."""
    copies_weights: bool = False
    """Whether Transformer Engine keeps 8-bit or 4-bit weights in addition to the bf16 weights."""
    gradient_bytes: int = 4
    """Bytes per element in gradient accumulation and reduction."""

    def flags(self, kinds: Collection[str], tensor: int, expert: int) -> str:
        """Return Megatron's flags for those of the techniques that apply to a model.

        Flags for gradients and for `overlaps_experts` are not included.

        Args:
            kinds: The model's layer kinds.
            tensor: Number of tensor-parallel ranks.
            expert: Number of expert-parallel ranks.
        """
        mixes = not _EXPERT_KINDS.isdisjoint(kinds)
        asked_by_flag = {
            self._graph_flags(kinds): True,
            "--moe-token-dispatcher-type flex": self.sends_once
            and mixes
            and expert > 1,
            "--use-transformer-engine-op-fuser": self.fuses_experts and mixes,
            "--tp-comm-overlap": self.overlaps_tensor and tensor > 1,
            "--fp8-dot-product-attention": self.attends_in_8bit,
            "--fp8-output-proj": self.outputs_in_8bit,
            "--cross-entropy-fusion-impl te": self.loses_in_place,
            "--transformer-impl local": self.is_local,
            "--no-gradient-accumulation-fusion": not self.fuses_gradients,
        }
        return " ".join(
            flag for flag, is_asked in asked_by_flag.items() if flag and is_asked
        )

    def _graph_flags(self, kinds: Collection[str]) -> str:
        """Return the flags for CUDA graphs, or an empty string if none covers these layer kinds."""
        if self.graphs == "none":
            return ""
        if self.graphs == "step":
            return "--cuda-graph-impl local --cuda-graph-scope full_iteration"
        modules = {
            "attn": not {"dense", "moe", "attention"}.isdisjoint(kinds),
            "mamba": "mamba" in kinds,
            # Megatron does not allow graphs for feed-forward networks if the experts'
            # all-to-all overlaps.
            "mlp": not {"dense", "mlp"}.isdisjoint(kinds) and not self.overlaps_experts,
            "moe_router moe_preprocess": not _EXPERT_KINDS.isdisjoint(kinds),
        }
        if self.graphs == "mamba":
            modules = {"mamba": modules["mamba"]}
        elif self.graphs == "router":
            modules = {
                "moe_router moe_preprocess": modules["moe_router moe_preprocess"]
            }
        scope = " ".join(
            module for module, is_in_model in modules.items() if is_in_model
        )
        if not scope:
            return ""
        return f"--cuda-graph-impl transformer_engine --cuda-graph-scope {scope}"

    @property
    def precision_flags(self) -> str:
        """Megatron's flags for the precision."""
        formats = {
            "bf16": "",
            "fp8": " --fp8-format hybrid --fp8-recipe tensorwise",
            "mxfp8": " --fp8-format e4m3 --fp8-recipe mxfp8",
            "nvfp4": " --fp4-format e2m1 --fp4-recipe nvfp4",
        }
        return f"--bf16{formats[self.precision]}"


def techniques_of_flags(
    flags: Sequence[str], precision: Precision | None = None
) -> Techniques:
    """Return the techniques that Megatron's flags request, with defaults from tuned recipes.

    The defaults are the `flex` dispatcher, overlapped tensor-parallel communication and, if the
    schedule supports them, graphs for everything except the experts. To turn these off, use
    `--moe-token-dispatcher-type alltoall`, `--disable-tp-comm-overlap-ag` and `--cuda-graph-impl
    none`.

    Args:
        flags: Megatron's flags.
        precision: Precision of the GEMMs in layers. None: the precision that the flags select.

    Raises:
        ArgumentsError: A flag's value is missing or invalid.
    """
    # By default, argparse exits on an error, but the planner is only one part of the
    # process.
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, exit_on_error=False
    )
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--cuda-graph-impl")
    # Newer releases call the scope --cuda-graph-modules.
    parser.add_argument(
        "--cuda-graph-scope",
        "--cuda-graph-modules",
        nargs="*",
        default=[],
    )
    parser.add_argument("--moe-token-dispatcher-type", default="flex")
    parser.add_argument("--cross-entropy-fusion-impl", default="native")
    parser.add_argument("--fp8-format", "--fp8")
    parser.add_argument("--fp8-recipe", default="delayed")
    parser.add_argument("--fp4-format", "--fp4")
    for name in _SWITCHES.split():
        parser.add_argument(f"--{name}", action="store_true")
    try:
        args, _ = parser.parse_known_args(list(flags))
    except argparse.ArgumentError as error:
        raise ArgumentsError(f"{error}; use the form that Megatron accepts") from error
    if precision is None:
        precision = _precision_of(args)
    return Techniques(
        precision=precision,
        attends_in_8bit=args.fp8_dot_product_attention,
        outputs_in_8bit=precision == "mxfp8" and args.fp8_output_proj,
        loses_in_place=args.cross_entropy_fusion_impl == "te",
        graphs=_graphs_of(args),
        fuses_experts=args.use_transformer_engine_op_fuser,
        sends_once="flex" in args.moe_token_dispatcher_type,
        overlaps_experts=args.overlap_moe_expert_parallel_comm,
        # 4-bit GEMMs do not overlap with communication.
        overlaps_tensor=precision != "nvfp4" and not args.disable_tp_comm_overlap_ag,
        is_local=args.transformer_impl == "local",
        fuses_gradients=not args.no_gradient_accumulation_fusion,
        # With these flags, the weights themselves are stored in the GEMMs' precision.
        copies_weights=precision != "bf16"
        and not (args.fp8_param_gather or args.fp4_param_gather),
        gradient_bytes=2 if args.grad_reduce_in_bf16 else 4,
    )


def techniques_of_arguments(args: argparse.Namespace) -> Techniques:
    """Return the techniques that Megatron's arguments request (see `techniques_of_flags`)."""
    values = vars(args)
    flags = []
    for dest, flag in _VALUED.items():
        value = values.get(dest)
        if value:
            flags += [flag, str(value)]
    flags += [
        f"--{name}" for name in _SWITCHES.split() if values.get(name.replace("-", "_"))
    ]
    # Megatron stores --no-gradient-accumulation-fusion as False under this name. If the
    # value is missing, the default applies, which is fused.
    if values.get("gradient_accumulation_fusion") is False:
        flags.append("--no-gradient-accumulation-fusion")
    # This package's schedules do not support graphs.
    return techniques_of_flags([*flags, "--cuda-graph-impl", "none"])


def _graphs_of(args: argparse.Namespace) -> Graphs:
    scope = set(args.cuda_graph_scope)
    if args.cuda_graph_impl == "none":
        return "none"
    # This has been a value of --cuda-graph-impl since 0.18. Before that, it was a
    # scope.
    if "full_iteration" in (args.cuda_graph_impl, *scope):
        return "step"
    # A scope that does not include attention covers only single modules.
    if scope and "attn" not in scope:
        return "mamba" if "mamba" in scope else "router"
    if scope or args.cuda_graph_impl is not None:
        return "layers"
    return "auto"


def _precision_of(args: argparse.Namespace) -> Precision:
    if args.fp4_format:
        return "nvfp4"
    if args.fp8_format:
        return "mxfp8" if args.fp8_recipe == "mxfp8" else "fp8"
    return "bf16"
