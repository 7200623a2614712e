"""The cost of a model part on one rank: seconds, parameters and bytes kept.

A kernel is limited by its operations or its memory traffic, whichever takes longer at the fraction
of peak that the device achieves, and takes at least `kernel_s`. A layer is limited by its kernels
or by the host's kernel launches, whichever take longer. Graphs need no launches. Weight gradients
are accumulated in four (or two) bytes, so GEMMs with few rows, as in models with many experts, are
memory-bound. Tensor parallelism implies sequence parallelism but does not divide experts. Every
expert receives the same number of tokens.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from megatron_ext.planning.techniques import Techniques

if TYPE_CHECKING:
    from megatron_ext.planning.hardware import DeviceKind
    from megatron_ext.planning.model_sizes import LayerKind, ModelSizes
    from megatron_ext.planning.techniques import Precision

Kind = Literal["embedding", "mtp", "loss"]
FULL = frozenset({"full"})

ASSUMPTIONS = {
    "activations": "as kept by Transformer Engine, with flash attention and no dropout: norm "
    "inputs and outputs, queries, keys, values, the attention output, and the activation "
    "function's inputs and output; GEMM operands are kept in the GEMM's precision",
    "logits": "6 bytes each while the loss is computed, as measured on an H100; 4 with "
    "--cross-entropy-loss-fusion, fitted to SimuMax's single-stage Llama results on B200",
    "gradients": "weight-gradient GEMMs accumulate into the buffer; the embedding gradient is as "
    "large as the embedding table and is added separately, as are all gradients with "
    "--no-gradient-accumulation-fusion",
    "products": "GEMMs run in waves of 256 x 128 tiles, one tile per processor; the last wave "
    "takes as long as a full one; a GEMM takes at least as long as reading and writing its "
    "operands",
    "host": "launches about 30 to 40 kernels in the forward pass of a dense bf16 layer, 105 to "
    "170 for a mixture of experts, and twice as many in the backward pass; without a pipeline, "
    "graphs contain all kernels except the experts', unless flags say otherwise; where the host "
    "waits for the experts' token counts, some of the overlapped time is exposed",
    "tensor parallelism": "two gathers and two scatters of [s, b, h] per layer and pass, with "
    "gathers in the next GEMM's precision; GEMMs hide most of this, except with NVFP4 or "
    "--disable-tp-comm-overlap-ag",
    "context parallelism": "attention hides the ring exchange of keys and values, unless the "
    "exchange takes longer",
    "experts": "all receive the same number of tokens; all-to-all sends one copy of a token to "
    "each rank and node, or all copies with --moe-token-dispatcher-type alltoall; in a pair, the "
    "computation in both actions hides a fraction `pair_overlap` of it",
    "recomputation": "covers layers, norms, feed-forward networks, experts, their activations and "
    "MLA's up-projections; flash attention keeps no scores, so core_attn saves nothing",
    "precision": "applies to the GEMMs in layers, not to attention, the embedding or the output; "
    "quantizing an element moves 6 (fp8), 3.5 (mxfp8) or 10 bytes (nvfp4); the last two are "
    "fitted",
    "data parallelism": "gradients are reduced in fp32, or in bf16 with --grad-reduce-in-bf16, "
    "during the last micro-batch's backward pass; parameters are gathered in bf16 during the "
    "first forward pass; only communication that takes longer than these passes is exposed",
    "optimizer": "moves 34 bytes per parameter in the shard, and 8 bytes per gradient on the "
    "rank to clear it and add it to the norm",
}


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a micro-batch's work is divided across ranks."""

    tensor: int = 1
    context: int = 1
    expert: int = 1
    micro_batch: int = 1
    sequence: int
    techniques: Techniques = field(default_factory=Techniques)
    fused_loss: bool = False


_OPERAND_BYTES = {
    "bf16": 2.0,
    "fp8": 1.0,
    "mxfp8": 1.0,
    "nvfp4": 0.5,
}
"""Bytes per element of a GEMM operand."""
_CAST_BYTES = {
    "bf16": 0.0,
    "fp8": 6.0,
    "mxfp8": 3.5,
    "nvfp4": 10.0,
}
"""Bytes of traffic per quantized element, including its transposed copy."""
_PRODUCT_KERNELS = {
    "bf16": 3,
    "fp8": 4,
    "mxfp8": 6,
    "nvfp4": 8,
}
"""Number of kernels in a linear layer's forward pass, including those that quantize operands."""


class Part(NamedTuple):
    """One layer, or one end of the model, on one rank for one micro-batch.

    A stage is the sum of its parts.
    """

    forward: float
    """Seconds."""
    input: float
    """Seconds for the input gradient, including any recomputation before it."""
    weight: float
    params: float
    """Number of weights on this rank, excluding expert weights."""
    expert_params: float
    operations: float
    """Operations in the forward pass, counted in the same way as for Megatron's TFLOP/s."""
    exchange: float
    """Seconds that the forward pass and input gradient spend exchanging tokens between experts.
    Pairs can hide this time. Excludes recomputation."""
    saved: float
    """Bytes kept between the forward and the backward pass."""
    waiting: float
    """Bytes kept from the input gradient until the weight gradient, if a schedule splits backward
    passes."""
    logits: float
    """Bytes that the loss keeps until its own backward pass starts, which is before that of any
    layer."""
    transient: float
    """Peak bytes during the backward pass, in addition to `saved`."""
    copies: float
    """Bytes of the weight copies, plain and transposed, that Transformer Engine keeps in the GEMMs'
    precision in addition to Megatron's weights."""
    dummies: float
    """Bytes of placeholder weight gradients, one per shape. Transformer Engine keeps these and
    passes them to autograd, while it adds the real gradients to Megatron's buffers."""

    @property
    def work(self) -> float:
        """Seconds for all three passes."""
        return self.forward + self.input + self.weight


def total(parts: Sequence[Part]) -> Part:
    """Return the total cost of several parts."""
    if not parts:
        return Part(*[0.0] * len(Part._fields))
    sizes_by_field = zip(*parts, strict=True)
    sums = Part._make(map(sum, sizes_by_field))
    return sums._replace(
        transient=max(part.transient for part in parts),
        # Layers of the same kind have the same shapes, so they share placeholder
        # gradients in Transformer Engine.
        dummies=sum({part.dummies for part in parts}),
    )


def beside(part: Part, overlap: float) -> Part:
    """Return a part without the share of the token exchange that computation can hide."""
    # A part may take no time at all.
    computed_s = part.forward + part.input or 1.0
    shown_share = 1 - overlap * part.exchange / computed_s
    return part._replace(
        forward=shown_share * part.forward, input=shown_share * part.input
    )


def gather_s(
    device: DeviceKind,
    num_bytes: float,
    num_ranks: int,
    stride: int = 1,
) -> float:
    """Return the seconds for a gather or scatter over ranks that are `stride` apart.

    `num_bytes` is the size of the full tensor. Every rank holds an equal part of it.
    """
    if num_ranks == 1:
        return 0.0
    places_in_node = device.node_size // stride
    ranks_in_node = max(1, min(num_ranks, places_in_node))
    link_rate = device.link_bytes * device.collective
    if ranks_in_node == num_ranks:
        # A ring needs one step fewer than its number of ranks. Each step moves one
        # rank's part.
        step_s = device.hop_s + num_bytes / num_ranks / link_rate
        return device.message_s + (num_ranks - 1) * step_s
    # In a ring across nodes, a node's participating devices share its network adapters.
    network_rate = device.network_bytes * ranks_in_node * device.network
    rate = min(network_rate, link_rate)
    transfer_s = num_bytes * (num_ranks - 1) / num_ranks / rate
    return device.message_s * 2 + transfer_s


def all_to_all_s(
    device: DeviceKind,
    num_bytes: float,
    num_ranks: int,
    copies_sent_once: int = 0,
) -> float:
    """Return the seconds for an all-to-all in which consecutive ranks send `num_bytes` each.

    If `copies_sent_once` is k, a token's k copies are sent over a node's links once per rank and
    over the network once per node. If it is 0, every copy is sent separately.
    """
    if num_ranks == 1:
        return 0.0
    ranks_in_node = min(num_ranks, device.node_size)
    # Data for other ranks in the same node goes over the node's links, and data for
    # other nodes goes over the network.
    node_s = num_bytes * (ranks_in_node - 1) / num_ranks / device.link_bytes
    network_s = (
        num_bytes * (num_ranks - ranks_in_node) / num_ranks / device.network_bytes
    )
    if copies_sent_once:
        node_s *= _distinct_share(1 / num_ranks, copies_sent_once)
        network_s *= _distinct_share(ranks_in_node / num_ranks, copies_sent_once)
    return device.message_s + max(node_s, network_s) / device.all_to_all


def _distinct_share(place_share: float, copies: int) -> float:
    """Return the expected share of copies that are the first to reach a random place."""
    reached_share = 1 - (1 - place_share) ** copies
    return reached_share / place_share / copies


def recompute_modes(model: ModelSizes) -> list[frozenset[str]]:
    """Return the sets of modules that can be recomputed, from none to entire layers."""
    norms = frozenset({"layernorm"})
    up_projection = frozenset({"mla_up_proj"})
    modes = [frozenset[str](), norms]
    if model.is_latent:
        modes += [up_projection, norms | up_projection]
    cheap_modules = modes[-1]
    if any(model.moe_layers):
        modes += [cheap_modules | {"moe_act"}, cheap_modules | {"moe"}]
    else:
        modes.append(cheap_modules | {"mlp"})
    return [*modes, FULL]


def mode_name(mode: frozenset[str]) -> str:
    """Return the name of a set of recomputed modules."""
    return "+".join(sorted(mode)) or "none"


def recompute_flags(mode: frozenset[str]) -> str:
    """Return Megatron's flags for recomputing a set of modules."""
    if not mode:
        return ""
    if mode == FULL:
        return "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    flags = f"--recompute-granularity selective --recompute-modules {' '.join(sorted(mode))}"
    # Megatron supports `moe_act` only for grouped experts.
    if "moe_act" in mode:
        flags += " --moe-grouped-gemm"
    return flags


class _Ledger:
    """Adds up a part's kernels by recomputable module."""

    def __init__(
        self,
        device: DeviceKind,
        sharding: Sharding,
        *,
        in_low_precision: bool,
    ) -> None:
        self.device = device
        self.sharding = sharding
        self.precision: Precision = "bf16"
        if in_low_precision:
            self.precision = sharding.techniques.precision
        self.product_rate = device.product_rate(self.precision)
        self.operand_bytes = _OPERAND_BYTES[self.precision]
        self.cast_bytes = _CAST_BYTES[self.precision]
        self.memory_rate = device.memory_bytes * device.memory
        self.forward_s: defaultdict[str, float] = defaultdict(float)
        """Module -> seconds."""
        self.saved_bytes: defaultdict[str, float] = defaultdict(float)
        """Module -> bytes."""
        self.input_s = 0.0
        self.weight_s = 0.0
        self.exchange_s = 0.0
        self.waiting_bytes = 0.0
        self.dummy_bytes = 0.0
        self.copy_bytes = 0.0
        self.params = 0.0
        self.expert_params = 0.0
        self.operations = 0.0
        self.num_launches = 0.0
        """Number of kernels that the host launches outside graphs in the forward pass. The backward
        pass launches twice as many."""
        self.waits_for_counts = False
        """Whether the host waits for the experts' token counts."""

    def linear(
        self,
        module: str,
        rows: float,
        inputs: float,
        outputs: float,
        *,
        gathers: bool = False,
    ) -> None:
        """Add a GEMM [rows, inputs] x [inputs, outputs] and its two gradients.

        If `gathers` is set, the input is divided across the tensor-parallel ranks.
        """
        self.params += inputs * outputs
        self._products(
            module,
            rows,
            inputs,
            outputs,
            count=1,
            product_rate=self.product_rate,
            cast_bytes=self.cast_bytes,
        )
        # Transformer Engine keeps the gathered input, whereas Megatron's own layers
        # gather it again in the backward pass.
        input_parts = 1
        if gathers and self.sharding.techniques.is_local:
            input_parts = self.sharding.tensor
        # The router has a GEMM of its own, whose weight gradient does not wait.
        if module != "router":
            self.waiting_bytes += (
                self.operand_bytes * rows * (inputs / input_parts + outputs)
            )
        self.launch(module, _PRODUCT_KERNELS[self.precision])

    def experts(
        self,
        rows: float,
        inputs: float,
        outputs: float,
        count: int,
    ) -> None:
        """Add the GEMMs of `count` experts with `rows` rows each."""
        self.expert_params += inputs * outputs * count
        if self.sharding.techniques.fuses_experts:
            rate_share = self.device.gemm_fused
            cast_bytes = 0.5 * self.cast_bytes
            kernels_per_expert = 0.0
        else:
            rate_share = self.device.gemm_grouped
            cast_bytes = self.cast_bytes
            kernels_per_expert = 0.15 * _PRODUCT_KERNELS[self.precision]
        self._products(
            "moe",
            rows,
            inputs,
            outputs,
            count=count,
            product_rate=self.product_rate * rate_share,
            cast_bytes=cast_bytes,
        )
        # W needs each expert's input and its output gradient.
        self.waiting_bytes += self.operand_bytes * rows * count * (inputs + outputs)
        self.launch("moe", 6 + kernels_per_expert * count)

    def _products(
        self,
        module: str,
        rows: float,
        inputs: float,
        outputs: float,
        *,
        count: int,
        product_rate: float,
        cast_bytes: float,
    ) -> None:
        """Add `count` GEMMs and their two gradients."""
        device = self.device
        techniques = self.sharding.techniques
        operand_bytes = self.operand_bytes
        all_rows = rows * count
        weights = inputs * outputs * count

        def product_s(
            height: float,
            width: float,
            depth: float,
            traffic_bytes: float,
        ) -> float:
            """Return the seconds for GEMMs [height, depth] x [depth, width]."""
            # A tile first loads its operands, `tile_bytes` per row. The last wave of
            # tiles takes as long as a full wave.
            load_factor = 1 + device.tile_bytes / (operand_bytes * depth)
            tile_rows = math.ceil(height / 256)
            tile_columns = math.ceil(width / 128)
            tiles = tile_rows * tile_columns * count
            waves = math.ceil(tiles / device.processors)
            wave_factor = waves * device.processors / tiles
            operations_s = 2 * rows * inputs * outputs * count / product_rate
            return max(
                operations_s * load_factor * wave_factor,
                traffic_bytes / self.memory_rate,
                device.kernel_s,
            )

        self.operations += 2 * rows * weights
        # The forward pass reads its input and the weights and writes its output in
        # bf16.
        traffic_bytes = (
            all_rows * (operand_bytes * inputs + 2 * outputs) + operand_bytes * weights
        )
        self.forward_s[module] += product_s(rows, outputs, inputs, traffic_bytes)
        self.forward_s[module] += cast_bytes * all_rows * inputs / self.memory_rate
        # The input gradient reads the output gradient and the weights, and is written in bf16.
        traffic_bytes = (
            all_rows * (2 * inputs + operand_bytes * outputs) + operand_bytes * weights
        )
        self.input_s += product_s(rows, inputs, outputs, traffic_bytes)
        self.input_s += cast_bytes * all_rows * outputs / self.memory_rate
        # The weight gradient reads the input and the output gradient.
        traffic_bytes = operand_bytes * all_rows * (inputs + outputs)
        # The kernel either updates the sum in Megatron's buffer (a read and a write) or
        # writes a bf16 tensor.
        if techniques.fuses_gradients:
            traffic_bytes += 2 * techniques.gradient_bytes * weights
        else:
            traffic_bytes += 2 * weights
        self.weight_s += (
            product_s(inputs, outputs, rows, traffic_bytes) / device.gemm_weight
        )
        # The forward pass uses a plain copy, and the input gradient a transposed one.
        if techniques.copies_weights and self.precision != "bf16":
            self.copy_bytes += 2 * operand_bytes * weights
        if techniques.fuses_gradients:
            self.dummy_bytes += 2 * inputs * outputs
        else:
            # A second kernel reads that tensor and updates the sum in Megatron's
            # buffer.
            self.weight_s += (
                2 * (1 + techniques.gradient_bytes) * weights / self.memory_rate
            )

    def elementwise(
        self,
        module: str,
        forward_bytes: float,
        backward_bytes: float,
        kernels: int = 1,
    ) -> None:
        """Add elementwise kernels, which are limited by their memory traffic."""
        shortest_s = kernels * self.device.kernel_s
        forward_s = forward_bytes / self.memory_rate
        backward_s = backward_bytes / self.memory_rate
        self.forward_s[module] += max(forward_s, shortest_s)
        self.input_s += max(backward_s, shortest_s)
        self.launch(module, kernels)

    def keep(self, module: str, fused_bytes: float, local_bytes: float) -> None:
        """Add the bytes kept until the backward pass by Transformer Engine's or Megatron's layers.

        Transformer Engine's layers keep `fused_bytes`, and Megatron's keep `local_bytes`.
        """
        if self.sharding.techniques.is_local:
            self.saved_bytes[module] += local_bytes
        else:
            self.saved_bytes[module] += fused_bytes

    def wait(self, module: str, forward_s: float, backward_s: float) -> None:
        """Add communication that computation does not hide."""
        self.forward_s[module] += forward_s
        self.input_s += backward_s

    def launch(self, module: str, kernels: float) -> None:
        """Count the kernels' launches, unless a graph contains the kernels."""
        is_in_experts = module in ("moe", "moe_act")
        # Value of `graphs` -> whether this module's kernels run outside graphs. `step`
        # is missing because it covers all kernels.
        is_outside = {
            "none": True,
            "router": module not in ("router", "shared_experts"),
            "mamba": module != "mamba",
            "layers": is_in_experts,
            "auto": is_in_experts,
        }
        graphs = self.sharding.techniques.graphs
        if is_outside.get(graphs, False):
            self.num_launches += kernels
            self.waits_for_counts |= module == "moe"

    def delay(self, kernels_s: float, launches_factor: float) -> float:
        """Return the factor by which launches slow down a pass whose kernels take `kernels_s`.

        `launches_factor` is the ratio of the pass's launches to a forward pass's.
        """
        launches_s = launches_factor * self.num_launches * self.device.launch_s
        shown_s = 0.0
        hidden_s = 0.0
        if self.sharding.techniques.overlaps_experts:
            # A pass takes this long even outside a pair. The host launches kernels
            # during the rest of the pass.
            hidden_s = self.device.pair_overlap * self.exchange_s / 2
            if self.waits_for_counts and not self.sharding.techniques.sends_once:
                launches_s *= self.device.split_launches
        elif self.waits_for_counts:
            shown_s = self.device.exposed * min(kernels_s, launches_s)
        pass_s = max(kernels_s - hidden_s, launches_s) + hidden_s + shown_s
        return pass_s / kernels_s

    def part(
        self,
        mode: frozenset[str] = frozenset(),
        *,
        layer_input_bytes: float = 0.0,
        transient_bytes: float = 0.0,
    ) -> Part:
        """Return the part with the modules in `mode` recomputed.

        With full recomputation, only `layer_input_bytes` are kept.
        """
        recomputed = set(mode)
        if mode == FULL:
            recomputed = set(self.forward_s) | set(self.saved_bytes)
        # Megatron recomputes the entire expert layer.
        if "moe" in mode:
            recomputed |= {"moe_act", "router", "shared_experts"}
        # Sort them, because the order of a set, and with it the rounding of the sums,
        # differs between processes, and all ranks must choose the same schedule.
        modules = sorted(recomputed)
        recomputed_s = sum(self.forward_s[module] for module in modules)
        dropped_bytes = sum(self.saved_bytes[module] for module in modules)
        forward_s = sum(self.forward_s.values())
        backward_s = self.input_s + recomputed_s + self.weight_s
        # Some parts have no kernels, such as an end without layers.
        forward_delay = self.delay(forward_s, 1.0) if forward_s else 1.0
        backward_delay = self.delay(backward_s, 2.0) if backward_s else 1.0
        saved_bytes = layer_input_bytes
        if mode != FULL:
            saved_bytes = sum(self.saved_bytes.values()) - dropped_bytes
        # Recomputed data exists again during its backward pass.
        if mode:
            transient_bytes += dropped_bytes
        return Part(
            forward=forward_s * forward_delay,
            input=backward_delay * (self.input_s + recomputed_s),
            weight=backward_delay * self.weight_s,
            params=self.params,
            expert_params=self.expert_params,
            operations=self.operations,
            exchange=self.exchange_s,
            saved=saved_bytes,
            waiting=self.waiting_bytes,
            logits=0.0,
            transient=transient_bytes,
            copies=self.copy_bytes,
            dummies=self.dummy_bytes,
        )


@lru_cache(maxsize=100_000)
def part_of(
    model: ModelSizes,
    kind: Kind | LayerKind,
    sharding: Sharding,
    device: DeviceKind,
    mode: frozenset[str] = frozenset(),
    *,
    holds_embedding: bool = True,
) -> Part:
    """Return the cost of a layer or an end; `mtp` means all multi-token prediction layers.

    `mode` contains the recomputed modules. If `holds_embedding` is set, the rank already holds the
    embedding weights, so a tied output layer and MTP need no copy of them.
    """
    books = _Books(model, sharding, device, kind)
    if kind == "embedding":
        return books.embedding()
    if kind == "loss":
        return books.loss(holds_embedding=holds_embedding)
    if kind == "mtp":
        layer = part_of(model, model.mtp_kind, sharding, device, mode)
        loss = part_of(model, "loss", sharding, device)
        return books.multi_token_prediction(
            layer, loss, holds_embedding=holds_embedding
        )
    return books.layer(kind, mode)


def parameters(model: ModelSizes, device: DeviceKind) -> tuple[float, float]:
    """Return a model's total parameters and active parameters per token, both without MTP."""
    kinds: list[Kind | LayerKind] = ["embedding", "loss", *model.kinds]
    unsharded = Sharding(sequence=1)
    parts = [part_of(model, kind, unsharded, device) for kind in kinds]
    all_parts = total(parts)
    num_experts = max(model.num_experts, 1)
    active_expert_params = all_parts.expert_params * model.top_k / num_experts
    return (
        all_parts.params + all_parts.expert_params,
        all_parts.params + active_expert_params,
    )


class _Books:
    """Records one part of a model in a ledger."""

    def __init__(
        self,
        model: ModelSizes,
        sharding: Sharding,
        device: DeviceKind,
        kind: Kind | LayerKind,
    ) -> None:
        self.model = model
        self.sharding = sharding
        self.device = device
        self.tensor = sharding.tensor
        self.hidden = float(model.hidden)
        self.tokens = sharding.sequence * sharding.micro_batch / sharding.context
        """Number of tokens per micro-batch on this rank. Between layers, tensor parallelism divides
        these further."""
        self.activation_elements = self.tokens * self.hidden / self.tensor
        """Number of elements of [s, b, h] on this rank."""
        self.table_params = model.vocabulary * self.hidden / self.tensor
        in_low_precision = kind != "embedding"
        if kind == "loss":
            in_low_precision = sharding.techniques.outputs_in_8bit
        self.ledger = _Ledger(device, sharding, in_low_precision=in_low_precision)
        # Transformer Engine quantizes a GEMM's input before gathering it (in
        # `gather_along_first_dim`) but scatters sums in bf16.
        activation_size = self.tokens * self.hidden
        gathered_bytes = self.ledger.operand_bytes * activation_size
        scattered_bytes = 2 * activation_size
        gather = gather_s(device, gathered_bytes, self.tensor)
        scatter = gather_s(device, scattered_bytes, self.tensor)
        self.exchange_s = (gather + scatter) / 2
        """Seconds for a gather or scatter among tensor-parallel ranks."""
        if sharding.techniques.overlaps_tensor:
            self.exchange_s *= 1 - device.overlap

    def embedding(self) -> Part:
        """Return the embedding part."""
        ledger = self.ledger
        elements = self.activation_elements
        # A gradient as large as the table is cleared and added to Megatron's buffer,
        # even if gradient accumulation is fused.
        bytes_per_param = 2 + self.sharding.techniques.gradient_bytes
        gradient_bytes = 2 * bytes_per_param * self.table_params
        backward_bytes = 10 * elements + gradient_bytes
        ledger.elementwise("base", 4 * elements, backward_bytes)
        ledger.wait("base", self.exchange_s, self.exchange_s)
        position_params = self.model.learned_positions * self.hidden
        ledger.params = self.table_params + position_params
        return ledger.part()

    def loss(self, *, holds_embedding: bool) -> Part:
        """Return the part with the last norm, the output layer and the loss."""
        ledger = self.ledger
        model = self.model
        elements = self.activation_elements
        ledger.linear(
            "base",
            self.tokens,
            self.hidden,
            model.vocabulary / self.tensor,
            gathers=True,
        )
        logits = self.tokens * model.vocabulary / self.tensor
        # Bytes of traffic per logit. The unfused loss makes an fp32 copy, finds its
        # maximum, subtracts it, exponentiates, sums, and divides by the sum. In
        # Megatron's `vocab_parallel_cross_entropy`, that adds up to 38 bytes. On an
        # H100, 35 were measured.
        forward_bytes = 38
        backward_bytes = 10
        if self.sharding.fused_loss:
            forward_bytes = 10
            if self.sharding.techniques.loses_in_place:
                forward_bytes = 6
                backward_bytes = 4
        ledger.elementwise(
            "base",
            forward_bytes * logits + 6 * elements,
            backward_bytes * logits + 6 * elements,
            kernels=8,
        )
        ledger.wait("base", self.exchange_s, self.exchange_s)
        local_bytes = self._kept_by_norm(elements) + 2 * elements
        ledger.keep("base", 4 * elements, local_bytes)
        # A tied output layer uses the embedding weights if they are on the same rank.
        shared_params = 0.0
        if model.is_tied and holds_embedding:
            shared_params = self.table_params
        ledger.params += self.hidden * model.norm_weights - shared_params
        # The unfused loss keeps the logits or their gradients in bf16 and the
        # probabilities in fp32.
        bytes_at_once = 6
        if self.sharding.fused_loss:
            bytes_at_once = 4
        part = ledger.part(transient_bytes=bytes_at_once * logits)
        return part._replace(logits=4 * logits)

    def multi_token_prediction(
        self,
        layer: Part,
        loss: Part,
        *,
        holds_embedding: bool,
    ) -> Part:
        """Return the part with all prediction heads, given the layer and loss of a single head."""
        ledger = self.ledger
        model = self.model
        elements = self.activation_elements
        # A head concatenates the hidden states with the next token's embedding and
        # projects the result.
        ledger.linear(
            "base",
            self.tokens,
            2 * self.hidden,
            self.hidden / self.tensor,
            gathers=True,
        )
        ledger.elementwise("base", 16 * elements, 24 * elements, kernels=3)
        ledger.wait("base", self.exchange_s, self.exchange_s)
        local_bytes = 2 * self._kept_by_norm(elements) + 4 * elements
        ledger.keep("base", 8 * elements, local_bytes)
        # The hidden states, the embedding and the output have one norm each.
        ledger.params += 3 * self.hidden * model.norm_weights
        projection = ledger.part()
        # All heads share the output layer's weights.
        shared_loss = loss._replace(params=0.0)
        head = total([projection, layer, shared_loss])
        heads = Part._make(model.mtp_layers * size for size in head)
        copied_params = self.table_params
        if holds_embedding:
            copied_params = 0.0
        return heads._replace(
            params=heads.params + copied_params,
            transient=head.transient,
            dummies=projection.dummies,
        )

    def layer(self, kind: LayerKind, mode: frozenset[str]) -> Part:
        """Return the part for a layer."""
        ledger = self.ledger
        model = self.model
        activation_bytes = 0.0
        # Tensor-parallel ranks gather before the projections, and scatter after the last
        # one.
        exchanges_s = 2 * self.exchange_s
        # `dense` and `moe` layers consist of attention and a feed-forward network. A
        # hybrid model's layers have a single module.
        if kind in ("dense", "moe", "attention"):
            self._attention()
            ledger.wait("attention", exchanges_s, exchanges_s)
        if kind == "mamba":
            self._scan()
            ledger.wait("mamba", exchanges_s, exchanges_s)
        if kind in ("dense", "mlp"):
            self._norm()
            projections_up = 2 if model.gated else 1
            width_up = model.ffn * projections_up / self.tensor
            width_down = model.ffn / self.tensor
            ledger.linear("mlp", self.tokens, self.hidden, width_up, gathers=True)
            activations = self.tokens * model.ffn / self.tensor
            activation_bytes = self._activation("mlp", activations)
            ledger.linear("mlp", self.tokens, width_down, self.hidden)
            ledger.wait("mlp", exchanges_s, exchanges_s)
            ledger.params += (width_up + self.hidden) * model.biases
        if kind in ("moe", "experts"):
            self._norm()
            activation_bytes = self._experts()
        return ledger.part(
            mode,
            layer_input_bytes=2 * self.activation_elements,
            transient_bytes=activation_bytes + 6 * self.activation_elements,
        )

    def _kept_by_norm(self, elements: float, width: float | None = None) -> float:
        """Return the bytes that torch's norm keeps for an input of `width`, or the hidden size.

        RMSNorm computes in fp32 and keeps two copies.
        """
        bytes_per_element = 2
        if self.model.norm_weights == 1:
            bytes_per_element = 8
        # One fp32 number per row.
        row_bytes = 4 * elements / (width or self.hidden)
        return bytes_per_element * elements + row_bytes

    def _norm(self) -> None:
        """Add a norm and the residual addition."""
        ledger = self.ledger
        elements = self.activation_elements
        ledger.params += self.model.hidden * self.model.norm_weights
        ledger.keep("base", 2 * elements, self._kept_by_norm(elements))
        output_bytes = ledger.operand_bytes * elements
        ledger.keep("layernorm", output_bytes, 2 * elements)
        # In bf16, the norm's forward pass reads and writes each element. Its backward
        # pass reads two tensors and writes one, as do both passes of the residual
        # addition.
        ledger.elementwise("layernorm", 4 * elements, 6 * elements)
        ledger.elementwise("base", 6 * elements, 6 * elements)

    def _experts(self) -> float:
        """Add a mixture of experts and return the size of its gradients in bytes."""
        ledger = self.ledger
        model = self.model
        device = self.device
        techniques = self.sharding.techniques
        num_ranks = self.sharding.expert
        width = model.expert_hidden
        tokens = self.tokens / self.tensor
        choices = tokens * model.top_k
        """Number of tokens, counted once for each of their experts."""
        num_local = model.num_experts // num_ranks
        projections_up = 2 if model.gated else 1
        width_up = model.expert_ffn * projections_up
        ledger.linear("router", tokens, self.hidden, model.num_experts)
        score_bytes = 16 * tokens * model.num_experts
        ledger.elementwise("router", score_bytes, score_bytes, kernels=20)
        # In a latent mixture, there is a projection before and after the experts.
        if width != self.hidden:
            ledger.linear("moe", tokens, self.hidden, width)
            ledger.linear("moe", tokens, width, self.hidden)
            ledger.saved_bytes["moe"] += 4 * tokens * width
        # Tokens are permuted and sorted by expert, in both directions. Assume 6 bytes
        # for every dispatcher, which fits the measurements best. One kernel in each
        # direction would move 8 bytes.
        permuted_bytes = 6 * choices * width
        ledger.elementwise("moe", permuted_bytes, permuted_bytes, kernels=6)
        ledger.saved_bytes["moe"] += ledger.operand_bytes * choices * width
        rows_per_expert = choices / num_local
        ledger.experts(rows_per_expert, width, width_up, num_local)
        gradient_bytes = self._activation("moe_act", choices * model.expert_ffn)
        if model.biases:
            ledger.params += model.num_experts
            ledger.expert_params += num_local * (width_up + width)
            bias_bytes = device.biases
            if techniques.fuses_experts:
                bias_bytes = device.biases_fused
            traffic_bytes = bias_bytes * choices * width_up
            ledger.elementwise("moe", traffic_bytes, traffic_bytes, kernels=4)
        ledger.experts(rows_per_expert, model.expert_ffn, width, num_local)
        fused_bytes = 8 * tokens * model.num_experts
        # Scores and, for every choice, its weight and its source and destination in 8
        # bytes.
        local_bytes = tokens * (3 * model.num_experts + 22 * model.top_k)
        ledger.keep("base", fused_bytes, local_bytes)
        # Kept data is copied into a fixed-size buffer and back.
        if techniques.graphs == "step":
            copied_bytes = 2 * ledger.saved_bytes["moe"]
            ledger.elementwise("moe", copied_bytes, copied_bytes, kernels=2)
        if model.shared_ffn:
            gradient_bytes = max(gradient_bytes, self._shared_experts())
        copies_sent_once = 0
        if techniques.sends_once:
            copies_sent_once = model.top_k
        sent_bytes = 2 * choices * width
        one_way_s = all_to_all_s(device, sent_bytes, num_ranks, copies_sent_once)
        # Tokens travel to the experts and back.
        exchange_s = 2 * one_way_s
        ledger.wait("moe", exchange_s, exchange_s)
        ledger.exchange_s = 2 * exchange_s
        ledger.launch("moe", 40)
        return gradient_bytes

    def _shared_experts(self) -> float:
        """Add the shared experts and return the size of their gradients in bytes."""
        ledger = self.ledger
        width = self.model.shared_ffn / self.tensor
        projections_up = 2 if self.model.gated else 1
        width_up = width * projections_up
        ledger.linear(
            "shared_experts",
            self.tokens,
            self.hidden,
            width_up,
            gathers=True,
        )
        gradient_bytes = self._activation("shared_experts", self.tokens * width)
        ledger.linear("shared_experts", self.tokens, width, self.hidden)
        exchanges_s = 2 * self.exchange_s
        ledger.wait("shared_experts", exchanges_s, exchanges_s)
        return gradient_bytes

    def _scan(self) -> None:
        """Add a Mamba-2 layer with its norm."""
        ledger = self.ledger
        model = self.model
        self._norm()
        inner_width = model.scan_heads * model.scan_head_size / self.tensor
        states = 2 * model.scan_groups * model.scan_state / self.tensor
        heads = model.scan_heads / self.tensor
        # A single projection computes the gate, the input, both state matrices and one
        # time step per head.
        projected_width = 2 * inner_width + states + heads
        ledger.linear("mamba", self.tokens, self.hidden, projected_width)
        # The convolution, chunked scan and gated norm are memory-bound, as the Triton
        # kernels are.
        channels = self.tokens * (inner_width + states)
        saved_width = 4 * inner_width + 2 * states
        ledger.saved_bytes["mamba"] += 2 * self.tokens * saved_width
        scan_bytes = self.device.scan_bytes * channels
        ledger.elementwise("mamba", scan_bytes, 2.5 * scan_bytes, kernels=14)
        ledger.linear("mamba", self.tokens, inner_width, self.hidden)
        # Weights: a convolution over four tokens with a bias, the gated norm, and each
        # head's decay, skip connection and time-step bias.
        ledger.params += 5 * (inner_width + states) + inner_width + 3 * heads
        # Megatron counts the scan with this formula.
        ledger.operations += 7 * self.tokens * inner_width * model.scan_state

    def _attention(self) -> None:
        """Add attention with its norm."""
        model = self.model
        heads = model.heads / self.tensor
        query_width = heads * model.head_size
        value_width = heads * model.value_size
        self._norm()
        # Rotary positions rotate the entire head, or part of it in latent attention.
        # Learned positions need no rotation.
        if model.is_latent:
            key_value_width = self._latent_projections(heads, query_width, value_width)
            rotated_width = model.rotary_size
        else:
            rotated_width = model.head_size
            if model.learned_positions:
                rotated_width = 0
            key_value_width = self._projections(
                heads, query_width, value_width, rotated_width
            )
        self._attention_kernels(query_width, value_width, key_value_width)
        self._keep_attention(heads, value_width, rotated_width)
        self.ledger.linear("attention", self.tokens, value_width, self.hidden)
        self.ledger.params += self.hidden * model.biases

    def _latent_projections(
        self,
        heads: float,
        query_width: float,
        value_width: float,
    ) -> float:
        """Add multi-latent attention's projections and return the width of keys and values."""
        ledger = self.ledger
        model = self.model
        tokens = self.tokens
        plain_size = model.head_size - model.rotary_size
        key_value_rank = model.key_value_rank
        key_value_outputs = heads * (plain_size + model.value_size)
        ledger.params += key_value_rank * model.qk_norm
        # Tensor parallelism does not divide the down-projections. Each rank projects
        # its own tokens.
        tokens_of_rank = tokens / self.tensor
        ledger.linear(
            "attention",
            tokens_of_rank,
            self.hidden,
            key_value_rank + model.rotary_size,
        )
        ledger.linear("mla_up_proj", tokens, key_value_rank, key_value_outputs)
        # Queries use the same input, so count it only once.
        shared_bytes = ledger.operand_bytes * tokens / self.tensor * self.hidden
        ledger.waiting_bytes -= shared_bytes
        latent_width = key_value_rank + model.rotary_size
        query_rank = model.query_rank
        if query_rank:
            ledger.linear("attention", tokens_of_rank, self.hidden, query_rank)
            ledger.linear("mla_up_proj", tokens, query_rank, query_width)
            ledger.params += query_rank * model.qk_norm
            latent_width += query_rank
        else:
            ledger.linear("attention", tokens, self.hidden, query_width)
        local_bytes = 2 * tokens * latent_width
        # The norms copy the latents.
        if model.qk_norm:
            local_bytes = 2 * tokens * (latent_width - model.rotary_size)
            local_bytes += self._kept_by_norm(tokens * key_value_rank, key_value_rank)
            if query_rank:
                local_bytes += self._kept_by_norm(tokens * query_rank, query_rank)
        fused_bytes = 4 * tokens * latent_width / self.tensor
        ledger.keep("attention", fused_bytes, local_bytes)
        projected_width = 2 * query_width + value_width
        ledger.saved_bytes["mla_up_proj"] += 2 * tokens * projected_width
        # One kernel rotates in place, and another joins the keys.
        traffic_bytes = 5 * tokens * query_width
        ledger.elementwise("mla_up_proj", traffic_bytes, traffic_bytes, kernels=6)
        return query_width + value_width

    def _projections(
        self,
        heads: float,
        query_width: float,
        value_width: float,
        rotated_width: int,
    ) -> float:
        """Add grouped-query attention's projection and return the width of keys and values."""
        ledger = self.ledger
        model = self.model
        tokens = self.tokens
        # If there are fewer groups than tensor-parallel ranks, several ranks share a group.
        groups = max(1.0, model.query_groups / self.tensor)
        key_value_width = groups * (model.head_size + model.value_size)
        output_width = query_width + key_value_width
        ledger.linear("attention", tokens, self.hidden, output_width, gathers=True)
        # A view of a GEMM's output keeps the entire output alive. Rotation copies
        # queries and keys. If heads share a group, the group is copied for every head.
        copies_groups = groups < heads
        viewed_width = output_width
        if rotated_width and copies_groups:
            viewed_width = query_width
        copied_width = 0.0
        if copies_groups:
            copied_width = query_width + value_width
        elif rotated_width:
            copied_width = 2 * query_width
        local_bytes = 2 * tokens * viewed_width
        local_bytes += 2 * tokens * copied_width
        if model.qk_norm:
            normed_elements = tokens * (query_width + key_value_width / 2)
            local_bytes += self._kept_by_norm(normed_elements, model.head_size)
        ledger.keep("attention", 2 * tokens * output_width, local_bytes)
        # The rotation and the norms read and write queries and keys.
        passes = 2
        if model.qk_norm:
            passes = 4
        traffic_bytes = 2 * passes * tokens * query_width
        ledger.elementwise("attention", traffic_bytes, traffic_bytes, kernels=4)
        ledger.params += model.qkv_biases * output_width
        if model.qk_norm:
            ledger.params += 2 * model.head_size * model.norm_weights
        return key_value_width

    def _attention_kernels(
        self,
        query_width: float,
        value_width: float,
        key_value_width: float,
    ) -> None:
        """Add causal attention's GEMMs: two in the forward pass, five in the backward pass."""
        ledger = self.ledger
        model = self.model
        device = self.device
        sharding = self.sharding
        # Twice the mean number of keys that a query sees, because the mask removes half
        # of the square.
        seen_keys = sharding.sequence * (1 - model.window_share)
        seen_in_window = min(sharding.sequence, 2 * model.window)
        seen_keys += seen_in_window * model.window_share
        operations = (
            seen_keys
            * sharding.sequence
            * sharding.micro_batch
            / sharding.context
            * (query_width + value_width)
        )
        ledger.operations += operations
        # Exponentials take just as long for small heads as for large ones.
        rate = device.flops * min(1.0, model.head_size / 128)
        if sharding.techniques.attends_in_8bit:
            rate *= device.attention_8bit
        kernels_s = 5 * device.kernel_s
        forward_rate = rate * device.attention_forward
        backward_rate = rate * device.attention_backward
        forward_s = operations / forward_rate + kernels_s
        backward_s = 2.5 * operations / backward_rate + kernels_s
        ledger.wait("core_attn", forward_s, backward_s)
        ledger.launch("attention", 10)
        # Attention's GEMMs hide the ring's messages.
        if sharding.context > 1:
            ring_bytes = 2 * self.tokens * sharding.context * key_value_width
            ring_s = gather_s(device, ring_bytes, sharding.context, self.tensor)
            shown_in_forward_s = max(0.0, ring_s - forward_s)
            shown_in_backward_s = max(0.0, 2 * ring_s - backward_s)
            ledger.wait("attention", shown_in_forward_s, shown_in_backward_s)

    def _keep_attention(
        self,
        heads: float,
        value_width: float,
        rotated_width: int,
    ) -> None:
        """Add the bytes that attention keeps."""
        ledger = self.ledger
        sharding = self.sharding
        # Attention keeps its output in bf16, and a GEMM in fewer bits keeps its own
        # copy as well. Megatron's own attention keeps the scores in bf16, plus the
        # sines and cosines for queries and keys.
        copy_bytes = 0.0
        if ledger.precision != "bf16":
            copy_bytes = ledger.operand_bytes
        # Flash attention keeps one fp32 sum of exponentials per query and head.
        sum_bytes = 4 * self.tokens * heads
        fused_bytes = (2 + copy_bytes) * self.tokens * value_width + sum_bytes
        rotation_bytes = 8 * sharding.sequence * rotated_width
        local_bytes = 2 * self.tokens * value_width + rotation_bytes
        ledger.keep("attention", fused_bytes, local_bytes)
        keys = sharding.sequence / sharding.context
        score_bytes = 2 * heads * sharding.micro_batch * keys * sharding.sequence
        ledger.keep("core_attn", 0.0, score_bytes)

    def _activation(self, module: str, elements: float) -> float:
        """Add the activation function and return the size of its gradients in bytes."""
        ledger = self.ledger
        num_inputs = 2 if self.model.gated else 1
        # Recomputing only the activation function still requires its input to be kept.
        input_module = "moe" if module == "moe_act" else module
        ledger.saved_bytes[input_module] += 2 * num_inputs * elements
        ledger.saved_bytes[module] += ledger.operand_bytes * elements
        # Without the fused kernel, a compiled kernel multiplies by the expert
        # probabilities in fp32 and reads everything twice in the backward pass.
        bytes_per_element = 2.0
        if module == "moe_act" and not self.sharding.techniques.fuses_experts:
            bytes_per_element = self.device.activation
        element_bytes = elements * bytes_per_element
        forward_bytes = element_bytes * (num_inputs + 1)
        backward_bytes = element_bytes * (2 * num_inputs + 1)
        ledger.elementwise(module, forward_bytes, backward_bytes)
        # Input and output gradients are in bf16.
        return 2 * elements * (num_inputs + 1)
