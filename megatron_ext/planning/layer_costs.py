"""Costs of each part of a model on one rank: seconds, parameters, bytes that are kept.

A kernel takes the longer of its operations and its traffic, at the shares of the peaks that the
device reaches, and at least `kernel_s`. Matrix products in bf16 read and write two bytes; weight
gradients add to four bytes, so products with few rows, such as those of many experts, are bound by
memory. Tensor parallelism implies sequence parallelism. Experts are not divided by it, and get
equal shares of the tokens.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from megatron_ext.planning.hardware import DeviceKind
    from megatron_ext.planning.model_sizes import ModelSizes

__all__ = [
    "ASSUMPTIONS",
    "FULL",
    "Part",
    "Sharding",
    "all_to_all_s",
    "gather_s",
    "model_flops",
    "part_of",
    "recompute_flags",
    "recompute_modes",
]

Kind = Literal["embedding", "dense", "moe", "mtp", "loss"]
FULL = frozenset({"full"})

ASSUMPTIONS = {
    "activations": "kept as Transformer Engine keeps them, flash attention, no dropout: inputs and "
    "outputs of norms, queries, keys, values, attention output, both sides of the activation",
    "logits": "10 bytes for each while the loss is computed, 4 with --cross-entropy-loss-fusion; "
    "the 4 is fitted to SimuMax's B200 rows of Llama with one stage",
    "tensor parallelism": "two gathers and two scatters of [s, b, h] for each layer and pass; "
    "those that run behind products slow them as much",
    "context parallelism": "keys and values go round behind attention; what is longer shows",
    "experts": "tokens balanced; all-to-all not behind computation, of every copy of a token, or "
    "with --moe-token-dispatcher-type flex of one for each node",
    "8 bits": "weights of layers, not attention, embedding or output; casts read 2 and write 2 "
    "bytes",
    "data parallelism": "gradients are reduced in fp32 behind the last micro-batch's backward, "
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
    is_8bit: bool = False
    fused_loss: bool = False


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
    saved: float
    """Bytes from the forward to the backward."""
    transient: float
    """Bytes at the worst moment of the backward, beyond that."""
    dummies: float
    """Bytes of the weight gradients, one for each shape, that Transformer Engine hands to autograd
    and keeps, while the real ones add to Megatron's buffers."""

    @property
    def work(self) -> float:
        """Seconds of all three."""
        return self.forward + self.input + self.weight


def gather_s(device: DeviceKind, size: float, ranks: int, stride: int = 1) -> float:
    """Return the seconds of a gather or scatter of `size` bytes in all over ranks of a stride."""
    if ranks == 1:
        return 0.0
    near = max(1, min(ranks, device.node_size // stride))
    if near == ranks:
        rate = device.link_bytes * device.collective
        return device.message_s + (ranks - 1) * (device.hop_s + size / ranks / rate)
    # A ring over nodes: all devices of a node that take part share its adapters.
    rate = device.network_bytes * near * device.collective
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
    if once_of and ranks > near:
        share = near / ranks  # of the ranks, in one node
        outside *= (1 - (1 - share) ** once_of) / share / once_of
    return device.message_s + max(inside, outside) / device.all_to_all


def recompute_modes(model: ModelSizes) -> list[frozenset[str]]:
    """Return sets of modules to recompute, from none to whole layers."""
    norms = frozenset({"layernorm"})
    modes = [frozenset(), norms]
    if model.is_latent:
        modes += [frozenset({"mla_up_proj"}), norms | {"mla_up_proj"}]
    return [*modes, modes[-1] | {"moe" if any(model.moe_layers) else "mlp"}, FULL]


def recompute_flags(mode: frozenset[str]) -> str:
    """Return Megatron's flags of a set of modules."""
    if not mode:
        return ""
    if mode == FULL:
        return "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    return f"--recompute-granularity selective --recompute-modules {' '.join(sorted(mode))}"


class _Ledger:
    """Adds up the kernels of a part, by the module that would recompute them."""

    def __init__(self, device: DeviceKind, *, is_8bit: bool) -> None:
        self.device = device
        self.rate = device.flops * device.gemm
        self.is_8bit = is_8bit
        if is_8bit:
            self.rate = device.flops_8bit * device.gemm_8bit
        self.traffic = device.memory_bytes * device.memory
        self.forward: defaultdict[str, float] = defaultdict(float)
        self.saved: defaultdict[str, float] = defaultdict(float)
        self.input = self.weight = 0.0
        self.dummies = 0.0

    def linear(
        self, module: str, rows: float, inputs: float, outputs: float, count: int = 1
    ) -> None:
        """Add `count` products [rows, inputs] x [inputs, outputs] and both of their gradients."""
        share = self.device.gemm_grouped if count > 1 else 1.0
        operations = 2 * rows * inputs * outputs * count / self.rate / share
        of_weights = operations / self.device.gemm_weight
        ends, weights = rows * (inputs + outputs) * count, inputs * outputs * count
        casts = 4 * ends / self.traffic if self.is_8bit else 0.0
        least = self.device.kernel_s
        once = max(operations, 2 * (ends + weights) / self.traffic, least)
        self.forward[module] += once + casts / 2
        self.input += once + casts / 2
        self.weight += max(of_weights, (2 * ends + 8 * weights) / self.traffic, least)
        self.dummies += 2 * inputs * outputs

    def pass_over(self, module: str, forward: float, backward: float, kernels: int = 1) -> None:
        """Add elementwise kernels by their bytes of traffic."""
        least = kernels * self.device.kernel_s
        self.forward[module] += max(forward / self.traffic, least)
        self.input += max(backward / self.traffic, least)

    def wait(self, module: str, forward: float, backward: float) -> None:
        """Add communication that computation does not hide, in seconds."""
        self.forward[module] += forward
        self.input += backward


@lru_cache(maxsize=100_000)
def part_of(
    model: ModelSizes,
    kind: Kind,
    by: Sharding,
    device: DeviceKind,
    mode: frozenset[str] = frozenset(),
    *,
    holds_embedding: bool = True,
) -> Part:
    """Return what a part costs; `mtp` stands for all layers of multi-token prediction.

    Args:
        model: The sizes.
        kind: The part.
        by: How a micro-batch is divided.
        device: What runs it.
        mode: The modules that are recomputed, or `FULL`.
        holds_embedding: Whether the embedding's weights are on the rank anyway, so that tied output
            layers and MTP need no copy.
    """
    t, hidden = by.tensor, float(model.hidden)
    rows = by.sequence * by.micro_batch / by.context
    wide = rows * hidden / t  # elements of [s, b, h] on this rank
    table = model.vocabulary * hidden / t
    exchange = gather_s(device, 2 * rows * hidden, t)
    books = _Ledger(device, is_8bit=by.is_8bit and kind not in ("embedding", "loss"))
    if kind == "embedding":
        books.pass_over("base", 4 * wide, 10 * wide)
        books.wait("base", exchange, exchange)
        positions = model.learned_positions * hidden
        return _closed(books, table + positions, 0.0, 0.0, frozenset(), 0.0)
    if kind == "loss":
        books.linear("base", rows, hidden, model.vocabulary / t)
        logits = rows * model.vocabulary / t
        each = 10 if by.fused_loss else 22
        books.pass_over("base", each * logits + 6 * wide, 10 * logits + 6 * wide, 8)
        books.wait("base", exchange, exchange)
        books.saved["base"] += 4 * wide
        weights = hidden * model.norm_weights
        if not (model.is_tied and holds_embedding):
            weights += table
        kept = (4 if by.fused_loss else 10) * logits
        return _closed(books, weights, 0.0, 0.0, frozenset(), kept)
    if kind == "mtp":
        layer = part_of(model, "moe" if model.moe_layers[-1] else "dense", by, device, mode)
        loss = part_of(model, "loss", by, device)
        books.linear("base", rows, 2 * hidden, hidden / t)
        books.pass_over("base", 16 * wide, 24 * wide, 3)
        books.wait("base", exchange, exchange)
        books.saved["base"] += 8 * wide
        own = _closed(books, 0.0, 0.0, 0.0, frozenset(), 0.0)
        weights = 2 * hidden * hidden / t + 3 * hidden * model.norm_weights
        count = model.mtp_layers
        return Part(
            count * (own.forward + layer.forward + loss.forward),
            count * (own.input + layer.input + loss.input),
            count * (own.weight + layer.weight + loss.weight),
            count * (weights + layer.params) + (0.0 if holds_embedding else table),
            count * layer.expert_params,
            count * (own.saved + layer.saved + loss.saved),
            max(layer.transient, loss.transient),
            own.dummies,
        )
    weights = _attention(books, model, by, rows, wide)
    books.wait("attention", 2 * exchange, 2 * exchange)
    expert_weights, act = 0.0, 0.0
    if kind == "dense":
        up = model.ffn * (2 if model.gated else 1) / t
        books.linear("mlp", rows, hidden, up)
        act = _activation(books, model, "mlp", rows * model.ffn / t)
        books.linear("mlp", rows, model.ffn / t, hidden)
        books.wait("mlp", 2 * exchange, 2 * exchange)
        weights += hidden * (up + model.ffn / t)
        weights += (up + hidden) * model.biases
    else:
        tokens, chosen = rows / t, rows / t * model.top_k
        local = model.num_experts // by.expert
        up = model.expert_ffn * (2 if model.gated else 1)
        books.linear("base", tokens, hidden, model.num_experts)
        books.pass_over(
            "base", 16 * tokens * model.num_experts, 16 * tokens * model.num_experts, 20
        )
        # Permuted and sorted by expert on both ways: reads and writes of 2 bytes.
        books.pass_over("moe", 15 * chosen * hidden, 15 * chosen * hidden, 6)
        once = model.top_k if model.sends_once else 0
        there = 2 * all_to_all_s(device, 2 * chosen * hidden, by.expert, once)
        books.wait("moe", there, there)
        books.saved["moe"] += 2 * chosen * hidden
        books.linear("moe", chosen / local, hidden, up, local)
        act = _activation(books, model, "moe", chosen * model.expert_ffn)
        books.linear("moe", chosen / local, model.expert_ffn, hidden, local)
        expert_weights = local * hidden * (up + model.expert_ffn)
        weights += hidden * model.num_experts
        books.saved["base"] += 8 * tokens * model.num_experts
        if model.shared_ffn:
            width = model.shared_ffn / t
            books.linear("moe", rows, hidden, width * (2 if model.gated else 1))
            act = max(act, _activation(books, model, "moe", rows * width))
            books.linear("moe", rows, width, hidden)
            books.wait("moe", 2 * exchange, 2 * exchange)
            weights += hidden * width * (3 if model.gated else 2)
    weights += 2 * hidden * model.norm_weights
    return _closed(books, weights, expert_weights, 2 * wide, mode, act + 6 * wide)


def _attention(books: _Ledger, model: ModelSizes, by: Sharding, rows: float, wide: float) -> float:
    """Add norms, residuals and attention; return the weights on this rank without norms."""
    t, hidden, device = by.tensor, float(model.hidden), books.device
    heads = model.heads / t
    queries, values = heads * model.head_size, heads * model.value_size
    books.saved["base"] += 4 * wide  # inputs of both norms
    books.saved["layernorm"] += 4 * wide
    books.pass_over("layernorm", 8 * wide, 12 * wide, 2)
    books.pass_over("base", 12 * wide, 12 * wide, 2)
    if model.is_latent:
        plain, latent = model.head_size - model.rotary_size, model.key_value_rank
        keys = heads * (plain + model.value_size)
        weights = hidden * (latent + model.rotary_size) + latent * keys + latent * model.qk_norm
        books.linear("attention", rows / t, hidden, latent + model.rotary_size)
        books.linear("mla_up_proj", rows, latent, keys)
        small = latent + model.rotary_size
        if rank := model.query_rank:
            books.linear("attention", rows / t, hidden, rank)
            books.linear("mla_up_proj", rows, rank, queries)
            weights += hidden * rank + rank * queries + rank * model.qk_norm
            small += rank
        else:
            books.linear("attention", rows, hidden, queries)
            weights += hidden * queries
        books.saved["attention"] += 4 * rows * small / t
        books.saved["mla_up_proj"] += 2 * rows * (2 * queries + values)
        books.pass_over("mla_up_proj", 8 * rows * queries, 8 * rows * queries, 6)
        each = queries + values
    else:
        groups = max(1.0, model.query_groups / t)
        each = groups * (model.head_size + model.value_size)
        books.linear("attention", rows, hidden, queries + each)
        books.saved["attention"] += 2 * rows * (queries + each)
        passes = 4 if model.qk_norm else 2
        books.pass_over("attention", 2 * passes * rows * queries, 2 * passes * rows * queries, 4)
        weights = (hidden + model.qkv_biases) * (queries + each)
        weights += 2 * model.head_size * model.norm_weights * model.qk_norm
    # Half of the square: causal. Two products forward, five backward.
    square = by.sequence**2 * by.micro_batch / by.context * (queries + values)
    rate = device.flops * (device.attention_latent if queries != values else 1.0)
    forward = square / (rate * device.attention_forward) + 5 * device.kernel_s
    backward = 2.5 * square / (rate * device.attention_backward) + 5 * device.kernel_s
    books.wait("attention", forward, backward)
    if by.context > 1:
        round_s = gather_s(device, 2 * rows * by.context * each, by.context, t)
        books.wait("attention", max(0.0, round_s - forward), max(0.0, 2 * round_s - backward))
    books.saved["attention"] += 2 * rows * values + 4 * rows * heads
    books.linear("attention", rows, values, hidden)
    return weights + values * hidden + hidden * model.biases


def _activation(books: _Ledger, model: ModelSizes, module: str, elements: float) -> float:
    """Add the activation function; return the bytes of its gradients."""
    inputs = 2 if model.gated else 1
    books.saved[module] += 2 * elements * (inputs + 1)
    books.pass_over(module, 2 * elements * (inputs + 1), 2 * elements * (2 * inputs + 1))
    return 2 * elements * (inputs + 1)


def _closed(
    books: _Ledger,
    params: float,
    expert_params: float,
    kept_whole: float,
    mode: frozenset[str],
    transient: float,
) -> Part:
    """Return the part, with the modules of the mode recomputed."""
    modules = set(books.forward) | set(books.saved) if mode == FULL else mode
    again = sum(books.forward[module] for module in modules)
    dropped = sum(books.saved[module] for module in modules)
    saved = kept_whole if mode == FULL else sum(books.saved.values()) - dropped
    return Part(
        sum(books.forward.values()),
        books.input + again,
        books.weight,
        params,
        expert_params,
        saved,
        transient + (dropped if mode else 0.0),
        books.dummies,
    )


def model_flops(model: ModelSizes, sequence: int) -> float:
    """Return the operations of a step for each token, as Megatron counts them for its TFLOP/s."""
    hidden, heads = float(model.hidden), model.heads
    queries, values = heads * model.head_size, heads * model.value_size
    if model.is_latent:
        plain, latent = model.head_size - model.rotary_size, model.key_value_rank
        attention = hidden * (latent + model.rotary_size)
        attention += latent * heads * (plain + model.value_size)
        rank = model.query_rank
        attention += hidden * rank + rank * queries if rank else hidden * queries
    else:
        attention = hidden * (queries + model.query_groups * (model.head_size + model.value_size))
    attention += values * hidden + sequence / 2 * (queries + values)
    gates = 3 if model.gated else 2
    routed = model.top_k * model.expert_ffn + model.shared_ffn
    dense, moe = gates * hidden * model.ffn, gates * hidden * routed + hidden * model.num_experts
    experts = sum(model.moe_layers) + (model.mtp_layers if model.moe_layers[-1] else 0)
    layers = model.num_layers + model.mtp_layers
    total = layers * attention + experts * moe + (layers - experts) * dense
    total += model.mtp_layers * 2 * hidden * hidden
    total += (1 + model.mtp_layers) * hidden * model.vocabulary
    return 6 * total
