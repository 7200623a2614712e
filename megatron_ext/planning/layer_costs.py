"""Costs of each part of a model on one rank: seconds, parameters, bytes that are kept.

A kernel takes the longer of its operations and its traffic, at the shares of the peaks that the
device reaches, and at least `kernel_s`; a layer the longer of its kernels and of their launches by
the host, unless a graph has them. Weight gradients add to four bytes (or two), so products with few
rows, such as those of many experts, are bound by memory. Tensor parallelism implies sequence
parallelism. Experts are not divided by it, and get equal shares of the tokens.
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

Kind = Literal["embedding", "mtp", "loss"]
FULL = frozenset({"full"})

ASSUMPTIONS = {
    "activations": "kept as Transformer Engine keeps them, flash attention, no dropout: inputs and "
    "outputs of norms, queries, keys, values, attention output, both sides of the activation; what "
    "a product takes in its own precision",
    "logits": "6 bytes for each while the loss is computed, as an H100 held, 4 with "
    "--cross-entropy-loss-fusion; the 4 is fitted to SimuMax's B200 rows of Llama with one stage",
    "gradients": "products of weight gradients add to the buffer; the embedding's is as large as "
    "the table, and added apart, as all are with --no-gradient-accumulation-fusion",
    "products": "in waves of tiles of 256 x 128, one on each processor, the last wave as long as a "
    "full one; at least as long as their operands take through memory",
    "host": "starts about 30 to 40 kernels for the forward of a dense layer in bf16 and 105 to 170 "
    "of a mixture, twice as many for the backward; without a pipeline they are in graphs, but for "
    "the experts, unless flags say otherwise; where the host waits for the tokens of each expert, "
    "part of what runs at the same time shows",
    "tensor parallelism": "two gathers and two scatters of [s, b, h] for each layer and pass, "
    "gathers in the precision of the product that follows; mostly behind products, but with NVFP4 "
    "or --disable-tp-comm-overlap-ag not",
    "context parallelism": "keys and values go round behind attention; what is longer shows",
    "experts": "tokens balanced; all-to-all of one copy of a token for each rank and node, with "
    "--moe-token-dispatcher-type alltoall of all; where a forward has a partner in a pair, the "
    "share `pair_overlap` of it runs behind the computation of both",
    "recomputation": "of layers, norms, networks, experts, their activations and MLA's up "
    "projections; flash attention keeps no scores, so core_attn saves nothing",
    "precision": "products of layers, not attention, embedding or output; quantizing an element "
    "moves 6 (fp8), 3.5 (mxfp8) or 10 bytes (nvfp4), of which the last two are fitted",
    "data parallelism": "gradients are reduced in fp32, with --grad-reduce-in-bf16 in bf16, behind "
    "the last micro-batch's backward, "
    "parameters gathered in bf16 behind the first forward; what is longer shows",
    "optimizer": "34 bytes of traffic for each parameter of the shard; 8 for each gradient of the "
    "rank, which is cleared and summed into the norm",
}


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How the work on a micro-batch is divided."""

    tensor: int = 1
    context: int = 1
    expert: int = 1
    micro_batch: int = 1
    sequence: int
    techniques: Techniques = field(default_factory=Techniques)
    fused_loss: bool = False


_BYTES = {"bf16": 2.0, "fp8": 1.0, "mxfp8": 1.0, "nvfp4": 0.5}
"""Of an operand's element in a product."""
_CASTS = {"bf16": 0.0, "fp8": 6.0, "mxfp8": 3.5, "nvfp4": 10.0}
"""Bytes of traffic for each element that is quantized, once with and once without transposing."""
_LAUNCHES = {"bf16": 3, "fp8": 4, "mxfp8": 6, "nvfp4": 8}
"""Kernels for the forward of a product with what quantizes its operands."""


class Part(NamedTuple):
    """One layer or end of a model on one rank, for one micro-batch; sums are stages."""

    forward: float
    """Seconds."""
    input: float
    """Of the input gradient, with what is recomputed before it."""
    weight: float
    params: float
    """Weights outside experts, on this rank."""
    expert_params: float
    operations: float
    """Of the forward, as Megatron counts them for its TFLOP/s."""
    exchange: float
    """Of forward and input gradient, seconds that experts exchange tokens, which pairs can hide:
    without those of what is recomputed."""
    saved: float
    """Bytes from the forward to the backward."""
    waiting: float
    """Bytes from the input gradient to the weight gradient, where a schedule splits backwards."""
    logits: float
    """Bytes that the loss keeps until its backward begins, before which that of no layer does."""
    transient: float
    """Bytes at the worst moment of the backward, beyond what is saved."""
    copies: float
    """Bytes of weights that Transformer Engine keeps in the precision of its products, once as they
    are and once transposed, beside Megatron's."""
    dummies: float
    """Bytes of the weight gradients, one for each shape, that Transformer Engine hands to autograd
    and keeps, while the real ones add to Megatron's buffers."""

    @property
    def work(self) -> float:
        """Seconds of all three."""
        return self.forward + self.input + self.weight


def total(parts: Sequence[Part]) -> Part:
    """Return what parts cost together."""
    if not parts:
        return Part(*[0.0] * len(Part._fields))
    *sums, transients, copies, dummies = zip(*parts, strict=True)
    # Layers of one kind have the same shapes.
    return Part._make([*map(sum, sums), max(transients), sum(copies), sum(set(dummies))])


def beside(part: Part, overlap: float) -> Part:
    """Return a part whose exchange of tokens runs behind computation as far as the device can."""
    left = 1 - overlap * part.exchange / (part.forward + part.input or 1.0)
    return part._replace(forward=left * part.forward, input=left * part.input)


def gather_s(device: DeviceKind, size: float, ranks: int, stride: int = 1) -> float:
    """Return the seconds of a gather or scatter of `size` bytes in all over ranks of a stride."""
    if ranks == 1:
        return 0.0
    near = max(1, min(ranks, device.node_size // stride))
    if near == ranks:
        rate = device.link_bytes * device.collective
        return device.message_s + (ranks - 1) * (device.hop_s + size / ranks / rate)
    # A ring over nodes: all devices of a node that take part share its adapters.
    rate = device.network_bytes * near * device.network
    return device.message_s * 2 + size * (ranks - 1) / ranks / min(
        rate, device.link_bytes * device.collective
    )


def all_to_all_s(device: DeviceKind, size: float, ranks: int, once_of: int = 0) -> float:
    """Return the seconds in which each of consecutive ranks sends `size` bytes to all.

    With `once_of` k, k copies at random ranks cross the network once for each node.
    """
    if ranks == 1:
        return 0.0
    near = min(ranks, device.node_size)
    inside = size * (near - 1) / ranks / device.link_bytes
    outside = size * (ranks - near) / ranks / device.network_bytes
    if once_of:  # by rank in a node, and by node on the network
        inside *= _distinct(1 / ranks, once_of)
        outside *= _distinct(near / ranks, once_of)
    return device.message_s + max(inside, outside) / device.all_to_all


def _distinct(share: float, copies: int) -> float:
    """Return which part of so many copies goes to different places of such a share."""
    return (1 - (1 - share) ** copies) / share / copies


def recompute_modes(model: ModelSizes) -> list[frozenset[str]]:
    """Return sets of modules to recompute, from none to whole layers."""
    norms, up = frozenset({"layernorm"}), frozenset({"mla_up_proj"})
    modes = [frozenset(), norms, *([up, norms | up] if model.is_latent else [])]
    more = ("moe_act", "moe") if any(model.moe_layers) else ("mlp",)
    return [*modes, *(modes[-1] | {module} for module in more), FULL]


def mode_name(mode: frozenset[str]) -> str:
    """Return a set of modules to recompute in words."""
    return "+".join(sorted(mode)) or "none"


def recompute_flags(mode: frozenset[str]) -> str:
    """Return Megatron's flags of a set of modules."""
    if not mode:
        return ""
    if mode == FULL:
        return "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    flags = f"--recompute-granularity selective --recompute-modules {' '.join(sorted(mode))}"
    return flags + (" --moe-grouped-gemm" if "moe_act" in mode else "")


class _Ledger:
    """Adds up the kernels of a part, by the module that would recompute them."""

    def __init__(self, device: DeviceKind, by: Sharding, *, is_low: bool) -> None:
        self.device, self.by = device, by
        self.precision = by.techniques.precision if is_low else "bf16"
        self.rate = device.product_rate(self.precision)
        self.bytes, self.casts = _BYTES[self.precision], _CASTS[self.precision]
        self.traffic = device.memory_bytes * device.memory
        self.forward: defaultdict[str, float] = defaultdict(float)
        self.saved: defaultdict[str, float] = defaultdict(float)
        self.input = self.weight = self.waiting = self.exchange = 0.0
        self.dummies = self.copies = 0.0
        self.params = self.expert_params = self.operations = self.launches = 0.0
        """Kernels of the forward that the host starts one by one; a backward has twice as many."""
        self.waits = False
        """Whether the host reads from the device how many tokens each expert got."""

    def linear(
        self, module: str, rows: float, inputs: float, outputs: float, *, gathers: bool = False
    ) -> None:
        """Add a product [rows, inputs] x [inputs, outputs] and both of its gradients.

        With `gathers` the tensor-parallel ranks each have a part of the input.
        """
        self.params += inputs * outputs
        self._products(module, rows, inputs, outputs, 1, self.rate, self.casts)
        # Transformer Engine keeps what it gathered, Megatron's own layers gather it again.
        parts = self.by.tensor if gathers and self.by.techniques.is_local else 1
        if module != "router":  # which has its own product, and no gradient that waits
            self.waiting += self.bytes * rows * (inputs / parts + outputs)
        self.launch(module, _LAUNCHES[self.precision])

    def experts(self, rows: float, inputs: float, outputs: float, count: int) -> None:
        """Add products of `count` experts, each of which gets so many rows."""
        fused = self.by.techniques.fuses_experts
        share = self.device.gemm_fused if fused else self.device.gemm_grouped
        casts = 0.5 * self.casts if fused else self.casts
        self.expert_params += inputs * outputs * count
        self._products("moe", rows, inputs, outputs, count, self.rate * share, casts)
        self.waiting += self.bytes * rows * count * (inputs + outputs)
        each = 0.0 if fused else 0.15 * _LAUNCHES[self.precision]
        self.launch("moe", 6 + each * count)

    def _products(
        self,
        module: str,
        rows: float,
        inputs: float,
        outputs: float,
        count: int,
        rate: float,
        casts: float,
    ) -> None:
        low, least = self.bytes, self.device.kernel_s

        def of(height: float, width: float, depth: float, size: float) -> float:
            # A tile loads for as long as so many bytes take before it computes, and the last wave
            # of tiles takes as long as a full one.
            waits = 1 + self.device.tile_bytes / (low * depth)
            tiles = math.ceil(height / 256) * math.ceil(width / 128) * count
            waves = math.ceil(tiles / self.device.processors) * self.device.processors / tiles
            operations = 2 * rows * inputs * outputs * count / rate
            return max(operations * waits * waves, size / self.traffic, least)

        everywhere, weights = rows * count, inputs * outputs * count
        self.operations += 2 * rows * weights
        size = everywhere * (low * inputs + 2 * outputs) + low * weights
        self.forward[module] += of(rows, outputs, inputs, size)
        self.forward[module] += casts * everywhere * inputs / self.traffic
        size = everywhere * (2 * inputs + low * outputs) + low * weights
        self.input += of(rows, inputs, outputs, size)
        self.input += casts * everywhere * outputs / self.traffic
        techniques, size = self.by.techniques, low * everywhere * (inputs + outputs)
        size += 2 * (techniques.gradient_bytes if techniques.fuses_gradients else 1) * weights
        self.weight += of(inputs, outputs, rows, size) / self.device.gemm_weight
        if techniques.copies_weights and self.precision != "bf16":
            self.copies += 2 * low * weights
        if techniques.fuses_gradients:
            self.dummies += 2 * inputs * outputs
        else:
            self.weight += 2 * (1 + techniques.gradient_bytes) * weights / self.traffic

    def pass_over(self, module: str, forward: float, backward: float, kernels: int = 1) -> None:
        """Add elementwise kernels by their bytes of traffic."""
        least = kernels * self.device.kernel_s
        self.forward[module] += max(forward / self.traffic, least)
        self.input += max(backward / self.traffic, least)
        self.launch(module, kernels)

    def keep(self, module: str, fused: float, local: float) -> None:
        """Add bytes until the backward, by Transformer Engine's layers and by Megatron's own."""
        self.saved[module] += local if self.by.techniques.is_local else fused

    def wait(self, module: str, forward: float, backward: float) -> None:
        """Add communication that computation does not hide, in seconds."""
        self.forward[module] += forward
        self.input += backward

    def launch(self, module: str, kernels: float) -> None:
        """Count kernels that are in no graph."""
        graphs = self.by.techniques.graphs
        outside = {
            "none": True,
            "router": module not in ("router", "shared_experts"),
            "mamba": module != "mamba",
            "layers": module in ("moe", "moe_act"),
            "auto": module in ("moe", "moe_act"),
        }
        if outside.get(graphs, False):
            self.launches += kernels
            self.waits |= module == "moe"

    def delay(self, seconds: float, times: float) -> float:
        """Return the factor by which so many times the launches slow kernels of `seconds`."""
        host = times * self.launches * self.device.launch_s
        shown = hidden = 0.0
        if self.by.techniques.overlaps_experts:
            # A pass outside of pairs has this on top; the host launches behind what is left.
            hidden = self.device.pair_overlap * self.exchange / 2
            if self.waits and not self.by.techniques.sends_once:
                host *= self.device.split_launches
        elif self.waits:
            shown = self.device.exposed * min(seconds, host)
        return (max(seconds - hidden, host) + hidden + shown) / seconds

    def part(
        self, mode: frozenset[str] = frozenset(), kept_whole: float = 0.0, transient: float = 0.0
    ) -> Part:
        """Return the part, with the modules of the mode recomputed."""
        modules = set(self.forward) | set(self.saved) if mode == FULL else set(mode)
        if "moe" in mode:
            modules |= {"moe_act", "router", "shared_experts"}
        again = sum(self.forward[module] for module in modules)
        dropped = sum(self.saved[module] for module in modules)
        forward, backward = sum(self.forward.values()), self.input + again + self.weight
        late = self.delay(backward, 2.0) if backward else 1.0
        return Part(
            forward=forward * (self.delay(forward, 1.0) if forward else 1.0),
            input=late * (self.input + again),
            weight=late * self.weight,
            params=self.params,
            expert_params=self.expert_params,
            operations=self.operations,
            exchange=self.exchange,
            saved=kept_whole if mode == FULL else sum(self.saved.values()) - dropped,
            waiting=self.waiting,
            logits=0.0,
            transient=transient + (dropped if mode else 0.0),
            copies=self.copies,
            dummies=self.dummies,
        )


@lru_cache(maxsize=100_000)
def part_of(
    model: ModelSizes,
    kind: Kind | LayerKind,
    by: Sharding,
    device: DeviceKind,
    mode: frozenset[str] = frozenset(),
    *,
    holds_embedding: bool = True,
) -> Part:
    """Return what a layer or an end costs; `mtp` is all layers of multi-token prediction.

    `mode` has the modules that are recomputed. With `holds_embedding` the embedding's weights are
    on the rank anyway, so that tied output layers and MTP need no copy.
    """
    t, hidden = by.tensor, float(model.hidden)
    rows = by.sequence * by.micro_batch / by.context
    wide = rows * hidden / t  # elements of [s, b, h] on this rank
    table = model.vocabulary * hidden / t
    is_low = kind not in ("embedding", "loss") or (kind == "loss" and by.techniques.outputs_in_8bit)
    books = _Ledger(device, by, is_low=is_low)
    # Transformer Engine gathers what a product takes after it is quantized (its function
    # `gather_along_first_dim`), and scatters sums in bf16.
    exchange = sum(gather_s(device, size * rows * hidden, t) for size in (books.bytes, 2)) / 2
    if by.techniques.overlaps_tensor:
        exchange *= 1 - device.overlap
    if kind == "embedding":
        # A gradient as large as the table is cleared, and added to Megatron's buffer, fused or not.
        of_table = 2 * (2 + by.techniques.gradient_bytes) * table
        books.pass_over("base", 4 * wide, 10 * wide + of_table)
        books.wait("base", exchange, exchange)
        books.params = table + model.learned_positions * hidden
        return books.part()
    if kind == "loss":
        books.linear("base", rows, hidden, model.vocabulary / t, gathers=True)
        logits = rows * model.vocabulary / t
        # Unfused: a copy in fp32, its largest, less that, exponentials, their sum, over that.
        passes = (10, 10) if by.fused_loss else (38, 10)
        if by.fused_loss and by.techniques.loses_in_place:
            passes = (6, 4)
        books.pass_over("base", passes[0] * logits + 6 * wide, passes[1] * logits + 6 * wide, 8)
        books.wait("base", exchange, exchange)
        books.keep("base", 4 * wide, _kept_by_norm(model, wide, hidden) + 2 * wide)
        shared = table if model.is_tied and holds_embedding else 0.0
        books.params += hidden * model.norm_weights - shared
        # The unfused loss has logits or their gradients in bf16 beside probabilities in fp32.
        at_once = (4 if by.fused_loss else 6) * logits
        return books.part(transient=at_once)._replace(logits=4 * logits)
    if kind == "mtp":
        layer = part_of(model, model.mtp_kind, by, device, mode)
        loss = part_of(model, "loss", by, device)
        books.linear("base", rows, 2 * hidden, hidden / t, gathers=True)
        books.pass_over("base", 16 * wide, 24 * wide, 3)
        books.wait("base", exchange, exchange)
        books.keep("base", 8 * wide, 2 * _kept_by_norm(model, wide, hidden) + 4 * wide)
        books.params += 3 * hidden * model.norm_weights
        own = books.part()
        each = total([own, layer, loss._replace(params=0.0)])
        heads = Part._make(model.mtp_layers * size for size in each)
        copy = 0.0 if holds_embedding else table
        return heads._replace(
            params=heads.params + copy, transient=each.transient, dummies=own.dummies
        )
    act = 0.0
    if kind in ("dense", "moe", "attention"):
        _attention(books, model, rows, wide)
        books.wait("attention", 2 * exchange, 2 * exchange)
    if kind == "mamba":
        _scan(books, model, rows, wide)
        books.wait("mamba", 2 * exchange, 2 * exchange)
    if kind in ("dense", "mlp"):
        _norm(books, model, wide)
        up = model.ffn * (2 if model.gated else 1) / t
        books.linear("mlp", rows, hidden, up, gathers=True)
        act = _activation(books, model, "mlp", rows * model.ffn / t)
        books.linear("mlp", rows, model.ffn / t, hidden)
        books.wait("mlp", 2 * exchange, 2 * exchange)
        books.params += (up + hidden) * model.biases
    if kind in ("moe", "experts"):
        _norm(books, model, wide)
        act = _experts(books, model, rows, exchange)
    return books.part(mode, kept_whole=2 * wide, transient=act + 6 * wide)


def parameters(model: ModelSizes, device: DeviceKind) -> tuple[float, float]:
    """Return the weights of a model without multi-token prediction: all, and those of a token."""
    ends: list[Kind | LayerKind] = ["embedding", "loss"]
    whole = total([part_of(model, kind, Sharding(sequence=1), device)
                   for kind in [*ends, *model.kinds]])  # fmt: skip
    used = whole.expert_params * model.top_k / max(model.num_experts, 1)
    return whole.params + whole.expert_params, whole.params + used


def _kept_by_norm(model: ModelSizes, elements: float, width: float) -> float:
    """Return the bytes that torch's norm keeps of its input: RMSNorm computes in fp32, twice."""
    return (8 if model.norm_weights == 1 else 2) * elements + 4 * elements / width


def _norm(books: _Ledger, model: ModelSizes, wide: float) -> None:
    """Add a norm and the sum with the residual."""
    books.params += model.hidden * model.norm_weights
    books.keep("base", 2 * wide, _kept_by_norm(model, wide, model.hidden))
    books.keep("layernorm", books.bytes * wide, 2 * wide)
    books.pass_over("layernorm", 4 * wide, 6 * wide)
    books.pass_over("base", 6 * wide, 6 * wide)


def _experts(books: _Ledger, model: ModelSizes, rows: float, exchange: float) -> float:
    """Add a mixture of experts; return the bytes of its gradients."""
    by, device, hidden, width = books.by, books.device, float(model.hidden), model.expert_hidden
    t = by.tensor
    tokens, chosen = rows / t, rows / t * model.top_k
    local = model.num_experts // by.expert
    up = model.expert_ffn * (2 if model.gated else 1)
    books.linear("router", tokens, hidden, model.num_experts)
    books.pass_over("router", 16 * tokens * model.num_experts, 16 * tokens * model.num_experts, 20)
    if width != hidden:
        books.linear("moe", tokens, hidden, width)
        books.linear("moe", tokens, width, hidden)
        books.saved["moe"] += 4 * tokens * width
    # Permuted, and sorted by expert, on both ways. 6 bytes are assumed, whatever the dispatcher,
    # which fits the fitted rows best; a kernel for each way would move 8.
    passes = 6 * chosen * width
    books.pass_over("moe", passes, passes, 6)
    books.saved["moe"] += books.bytes * chosen * width
    books.experts(chosen / local, width, up, local)
    act = _activation(books, model, "moe_act", chosen * model.expert_ffn)
    if model.biases:
        books.params += model.num_experts
        books.expert_params += local * (up + width)
        each = device.biases_fused if by.techniques.fuses_experts else device.biases
        passes = each * chosen * up
        books.pass_over("moe", passes, passes, 4)
    books.experts(chosen / local, model.expert_ffn, width, local)
    # Scores; of each choice where it goes and comes from in 8 bytes, and its weight.
    marks = tokens * (3 * model.num_experts + 22 * model.top_k)
    books.keep("base", 8 * tokens * model.num_experts, marks)
    if by.techniques.graphs == "step":  # what is kept goes to a buffer of fixed size and back
        books.pass_over("moe", 2 * books.saved["moe"], 2 * books.saved["moe"], 2)
    if model.shared_ffn:
        own = model.shared_ffn / t
        books.linear("shared_experts", rows, hidden, own * (2 if model.gated else 1), gathers=True)
        act = max(act, _activation(books, model, "shared_experts", rows * own))
        books.linear("shared_experts", rows, own, hidden)
        books.wait("shared_experts", 2 * exchange, 2 * exchange)
    once = model.top_k if by.techniques.sends_once else 0
    there = 2 * all_to_all_s(device, 2 * chosen * width, by.expert, once)
    books.wait("moe", there, there)
    books.exchange = 2 * there
    books.launch("moe", 40)
    return act


def _scan(books: _Ledger, model: ModelSizes, rows: float, wide: float) -> None:
    """Add a Mamba-2 layer with its norm."""
    t, hidden = books.by.tensor, float(model.hidden)
    _norm(books, model, wide)
    inner = model.scan_heads * model.scan_head_size / t
    states = 2 * model.scan_groups * model.scan_state / t
    heads = model.scan_heads / t
    books.linear("mamba", rows, hidden, 2 * inner + states + heads)
    # Convolution, scan in chunks, gated norm: bound by memory, as Triton's kernels are.
    size = rows * (inner + states)
    books.saved["mamba"] += 2 * rows * (4 * inner + 2 * states)
    scan = books.device.scan_bytes * size
    books.pass_over("mamba", scan, 2.5 * scan, 14)
    books.linear("mamba", rows, inner, hidden)
    books.params += 5 * (inner + states) + inner + 3 * heads
    books.operations += 7 * rows * inner * model.scan_state


def _attention(books: _Ledger, model: ModelSizes, rows: float, wide: float) -> None:
    """Add attention with its norm."""
    by, hidden, device = books.by, float(model.hidden), books.device
    t = by.tensor
    heads = model.heads / t
    queries, values = heads * model.head_size, heads * model.value_size
    _norm(books, model, wide)
    if model.is_latent:
        plain, latent = model.head_size - model.rotary_size, model.key_value_rank
        keys = heads * (plain + model.value_size)
        books.params += latent * model.qk_norm
        books.linear("attention", rows / t, hidden, latent + model.rotary_size)
        books.linear("mla_up_proj", rows, latent, keys)
        books.waiting -= books.bytes * rows / t * hidden  # queries are made of the same input
        small = latent + model.rotary_size
        if rank := model.query_rank:
            books.linear("attention", rows / t, hidden, rank)
            books.linear("mla_up_proj", rows, rank, queries)
            books.params += rank * model.qk_norm
            small += rank
        else:
            books.linear("attention", rows, hidden, queries)
        kept = 2 * rows * small  # latents that norms would copy
        if model.qk_norm:
            kept = 2 * rows * (small - model.rotary_size)
            kept += _kept_by_norm(model, rows * latent, latent)
            kept += _kept_by_norm(model, rows * rank, rank) if rank else 0.0
        books.keep("attention", 4 * rows * small / t, kept)
        books.saved["mla_up_proj"] += 2 * rows * (2 * queries + values)
        turning = model.rotary_size
        # Rotated in place, and keys put together: one kernel each.
        books.pass_over("mla_up_proj", 5 * rows * queries, 5 * rows * queries, 6)
        each = queries + values
    else:
        groups = max(1.0, model.query_groups / t)
        each = groups * (model.head_size + model.value_size)
        books.linear("attention", rows, hidden, queries + each, gathers=True)
        # A view of what the product gave keeps all of it. Turning copies queries and keys, and
        # groups are copied for each head.
        turning = 0 if model.learned_positions else model.head_size
        product, copied = queries + each, groups < heads
        kept = 2 * rows * (product if not turning or not copied else queries)
        kept += 2 * rows * (queries + values if copied else 2 * queries if turning else 0)
        if model.qk_norm:
            kept += _kept_by_norm(model, rows * (queries + each / 2), model.head_size)
        books.keep("attention", 2 * rows * product, kept)
        passes = 4 if model.qk_norm else 2
        books.pass_over("attention", 2 * passes * rows * queries, 2 * passes * rows * queries, 4)
        books.params += model.qkv_biases * (queries + each)
        books.params += 2 * model.head_size * model.norm_weights * model.qk_norm
    # Half of the square: causal. Two products forward, five backward.
    seen = by.sequence * (1 - model.window_share)
    seen += min(by.sequence, 2 * model.window) * model.window_share
    square = seen * by.sequence * by.micro_batch / by.context * (queries + values)
    books.operations += square
    # Exponentials take as long for small heads.
    rate = device.flops * min(1.0, model.head_size / 128)
    if by.techniques.attends_in_8bit:
        rate *= device.attention_8bit
    forward = square / (rate * device.attention_forward) + 5 * device.kernel_s
    backward = 2.5 * square / (rate * device.attention_backward) + 5 * device.kernel_s
    books.wait("core_attn", forward, backward)
    books.launch("attention", 10)
    if by.context > 1:
        round_s = gather_s(device, 2 * rows * by.context * each, by.context, t)
        books.wait("attention", max(0.0, round_s - forward), max(0.0, 2 * round_s - backward))
    # Attention keeps its output in bf16, a product in fewer bits its own copy. Megatron's own
    # attention keeps the scores in bf16, and the sines and cosines of queries and keys.
    copy = books.bytes if books.precision != "bf16" else 0.0
    scores = 2 * heads * by.micro_batch * (by.sequence / by.context) * by.sequence
    books.keep(
        "attention",
        (2 + copy) * rows * values + 4 * rows * heads,
        2 * rows * values + 8 * by.sequence * turning,
    )
    books.keep("core_attn", 0.0, scores)
    books.linear("attention", rows, values, hidden)
    books.params += hidden * model.biases


def _activation(books: _Ledger, model: ModelSizes, module: str, elements: float) -> float:
    """Add the activation function; return the bytes of its gradients."""
    inputs = 2 if model.gated else 1
    # Recomputed alone, an activation's input stays.
    books.saved["moe" if module == "moe_act" else module] += 2 * inputs * elements
    books.saved[module] += books.bytes * elements
    # Outside the fused kernel, a compiled one multiplies by the experts' probabilities in fp32, and
    # its backward reads all twice.
    again = module == "moe_act" and not books.by.techniques.fuses_experts
    each = elements * (books.device.activation if again else 2.0)
    books.pass_over(module, each * (inputs + 1), each * (2 * inputs + 1))
    return 2 * elements * (inputs + 1)
