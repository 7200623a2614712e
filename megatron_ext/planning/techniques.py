"""Ways to run the same model faster that flags of Megatron's ask for, and that costs depend on."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_ext.errors import ArgumentsError

Precision = Literal["bf16", "fp8", "mxfp8", "nvfp4"]
Graphs = Literal["auto", "none", "router", "mamba", "layers", "step"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp8", "mxfp8", "nvfp4")


@dataclass(frozen=True, kw_only=True)
class Techniques:
    """How the products, launches and messages of a layer run."""

    precision: Precision = "bf16"
    """Of the products in layers; `fp8` scales by tensor, `mxfp8` and `nvfp4` by block."""
    attends_in_8bit: bool = False
    """Whether attention is in 8 bits, too."""
    outputs_in_8bit: bool = False
    """Whether the output layer is, too, in `mxfp8`."""
    loses_in_place: bool = False
    """Whether Transformer Engine computes a fused loss, whose gradients take the logits' place."""
    graphs: Graphs = "none"
    """CUDA graphs: `router` has router and shared experts alone, `mamba` such layers, `layers` all
    but the experts, `step` all; `auto` is `layers` where Megatron and the schedule take them, else
    `none`."""
    fuses_experts: bool = False
    """Whether products of all experts, activation and quantization are one kernel."""
    sends_once: bool = False
    """Whether a token goes once to each rank and node of its experts (dispatcher `flex`), not once
    to each expert."""
    overlaps_experts: bool = False
    """Whether all-to-all runs behind the computation of another micro-batch: in pairs."""
    overlaps_tensor: bool = False
    """Whether gathers and scatters of tensor parallelism run behind products."""
    is_local: bool = False
    """Whether layers are Megatron's own, not Transformer Engine's; costs no time here."""
    fuses_gradients: bool = True
    """Whether products add weight gradients to Megatron's buffers, but that of the embedding."""
    copies_weights: bool = False
    """Whether Transformer Engine keeps weights in 8 or 4 bits beside Megatron's in bf16."""
    gradient_bytes: int = 4
    """Of an element of the gradients that add up, and are reduced."""

    def flags(self, kinds: Collection[str], tensor: int, expert: int) -> str:
        """Return Megatron's flags that ask for these, as far as a model and its sizes have them.

        Those of gradients and pairs are not among them.

        Args:
            kinds: Kinds of the model's layers.
            tensor: Tensor-parallel ranks.
            expert: Expert-parallel ranks.
        """
        mixes = not {"moe", "experts"}.isdisjoint(kinds)
        modules = {
            "attn": not {"dense", "moe", "attention"}.isdisjoint(kinds),
            "mamba": "mamba" in kinds,
            # Megatron refuses networks among the graphs where experts run in pairs.
            "mlp": not {"dense", "mlp"}.isdisjoint(kinds) and not self.overlaps_experts,
            "moe_router moe_preprocess": mixes,
        }
        if self.graphs in ("router", "mamba"):
            only = "mamba" if self.graphs == "mamba" else "moe_router moe_preprocess"
            modules = {only: modules[only]}
        graphs = ""
        if self.graphs == "step":
            graphs = "--cuda-graph-impl local --cuda-graph-scope full_iteration"
        elif self.graphs != "none" and any(modules.values()):
            scope = " ".join(name for name, is_there in modules.items() if is_there)
            graphs = f"--cuda-graph-impl transformer_engine --cuda-graph-scope {scope}"
        words = {
            graphs: True,
            "--moe-token-dispatcher-type flex": self.sends_once and mixes and expert > 1,
            "--use-transformer-engine-op-fuser": self.fuses_experts and mixes,
            "--tp-comm-overlap": self.overlaps_tensor and tensor > 1,
            "--fp8-dot-product-attention": self.attends_in_8bit,
            "--fp8-output-proj": self.outputs_in_8bit,
            "--cross-entropy-fusion-impl te": self.loses_in_place,
            "--transformer-impl local": self.is_local,
            "--no-gradient-accumulation-fusion": not self.fuses_gradients,
        }
        return " ".join(word for word, is_asked in words.items() if word and is_asked)

    @property
    def precision_flags(self) -> str:
        """Megatron's flags of the precision."""
        formats = {
            "bf16": "",
            "fp8": " --fp8-format hybrid --fp8-recipe tensorwise",
            "mxfp8": " --fp8-format e4m3 --fp8-recipe mxfp8",
            "nvfp4": " --fp4-format e2m1 --fp4-recipe nvfp4",
        }
        return f"--bf16{formats[self.precision]}"


def techniques_of_flags(flags: Sequence[str], precision: Precision | None = None) -> Techniques:
    """Return what flags of Megatron's ask for, and where they say nothing what tuned recipes have.

    Those are graphs of all but the experts where a schedule takes them, the dispatcher `flex`, and
    tensor parallelism whose communication overlaps. `--cuda-graph-impl none`,
    `--moe-token-dispatcher-type alltoall` and `--disable-tp-comm-overlap-ag` are without.

    Args:
        flags: Megatron's flags.
        precision: Precision of the layers' products; None: that of the flags.

    Raises:
        ArgumentsError: A flag lacks its value, or has one that it does not take.
    """
    # An error of argparse's would end the process, of which the planner is only a part.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--cuda-graph-impl")
    parser.add_argument("--cuda-graph-scope", "--cuda-graph-modules", nargs="*", default=[])
    parser.add_argument("--moe-token-dispatcher-type", default="flex")
    parser.add_argument("--cross-entropy-fusion-impl", default="native")
    parser.add_argument("--fp8-format", "--fp8")
    parser.add_argument("--fp8-recipe", default="delayed")
    parser.add_argument("--fp4-format", "--fp4")
    switches = (
        "use-transformer-engine-op-fuser overlap-moe-expert-parallel-comm "
        "disable-tp-comm-overlap-ag fp8-dot-product-attention fp8-output-proj grad-reduce-in-bf16 "
        "no-gradient-accumulation-fusion fp8-param-gather fp4-param-gather"
    )
    for name in switches.split():
        parser.add_argument(f"--{name}", action="store_true")
    try:
        given, _ = parser.parse_known_args(list(flags))
    except argparse.ArgumentError as error:
        raise ArgumentsError(f"{error}; give it as Megatron takes it") from error
    scope = set(given.cuda_graph_scope)
    graphs: Graphs = "auto"
    if given.cuda_graph_impl == "none":
        graphs = "none"
    elif "full_iteration" in (given.cuda_graph_impl, *scope):
        graphs = "step"
    elif scope and "attn" not in scope:
        graphs = "mamba" if "mamba" in scope else "router"
    elif scope or given.cuda_graph_impl is not None:
        graphs = "layers"
    if precision is None:
        precision = "bf16"
        if given.fp4_format:
            precision = "nvfp4"
        elif given.fp8_format:
            precision = "mxfp8" if given.fp8_recipe == "mxfp8" else "fp8"
    return Techniques(
        precision=precision,
        attends_in_8bit=given.fp8_dot_product_attention,
        outputs_in_8bit=precision == "mxfp8" and given.fp8_output_proj,
        loses_in_place=given.cross_entropy_fusion_impl == "te",
        graphs=graphs,
        fuses_experts=given.use_transformer_engine_op_fuser,
        sends_once="flex" in given.moe_token_dispatcher_type,
        overlaps_experts=given.overlap_moe_expert_parallel_comm,
        # Products in 4 bits have no communication that overlaps.
        overlaps_tensor=precision != "nvfp4" and not given.disable_tp_comm_overlap_ag,
        is_local=given.transformer_impl == "local",
        fuses_gradients=not given.no_gradient_accumulation_fusion,
        copies_weights=precision != "bf16"
        and not (given.fp8_param_gather or given.fp4_param_gather),
        gradient_bytes=2 if given.grad_reduce_in_bf16 else 4,
    )
