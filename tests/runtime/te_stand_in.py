"""A stand-in for Transformer Engine that Megatron's wrapper of its attention can use.

Only attention computes something, with the arguments and masks of Transformer Engine's
`DotProductAttention`. All other classes merely exist, so that Megatron can be imported. Install it
in a process that has not imported Megatron yet.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

_VERSION = "2.9.0"


class DotProductAttention(torch.nn.Module):
    """Computes what `transformer_engine.pytorch.DotProductAttention` does, in plain torch."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        softmax_scale: float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.attn_mask_type, self.scale = attn_mask_type, softmax_scale
        self.unfused_attention = SimpleNamespace(attention_type="self")
        self.masks: list[str] = []
        """Kinds of masks that were requested."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        qkv_format: str = "sbhd",
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str = "causal",
        pad_between_seqs: bool | None = None,
    ) -> torch.Tensor:
        """Attend; `[s, b, heads, width]`, or `[t, heads, width]` with `qkv_format` thd."""
        self.masks.append(attn_mask_type)
        query, key, value = _as_read(query, key, value)
        if qkv_format == "sbhd":
            assert cu_seqlens_q is None
            mask = _later(
                len(query), len(key), attn_mask_type
            )  # causal, so no other mask is read
            return self._attend(query, key, value, mask)
        assert qkv_format == "thd"
        assert cu_seqlens_q is not None
        assert cu_seqlens_kv is not None
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
        assert cu_seqlens_q.shape == cu_seqlens_kv.shape
        assert max_seqlen_q == cu_seqlens_q.diff().max()  # kernels read only this far
        assert max_seqlen_kv == cu_seqlens_kv.diff().max()
        assert attn_mask_type.startswith("padding")
        if (
            self.unfused_attention.attention_type == "self"
        ):  # it then reads only `cu_seqlens_q`
            assert cu_seqlens_q.equal(cu_seqlens_kv)
        parts = []
        queries, keys = (
            pairwise(cu_seqlens_q.tolist()),
            pairwise(cu_seqlens_kv.tolist()),
        )
        for (begin, end), (first, last) in zip(queries, keys, strict=True):
            mask = _later(end - begin, last - first, attn_mask_type)
            operands = (
                query[begin:end, None],
                key[first:last, None],
                value[first:last, None],
            )
            parts.append(self._attend(*operands, mask)[:, 0])
        return torch.cat(parts)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        shared = query.shape[2] // key.shape[2]
        key, value = (x.repeat_interleave(shared, dim=2) for x in (key, value))
        scale = self.scale or query.shape[-1] ** -0.5
        scores = torch.einsum("qbhw,kbhw->bhqk", query, key) * scale
        scores = scores.masked_fill(mask, -torch.inf)
        return torch.einsum("bhqk,kbhw->qbhw", scores.softmax(-1), value).flatten(2)


def _as_read(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return queries, keys and values as the library's kernels read them (`get_qkv_layout`)."""
    if len({x.untyped_storage().data_ptr() for x in tensors}) == 1:
        return tensors  # parts of one memory, or copied
    query, *others = tensors
    widths = [[stride / x.shape[-1] for stride in x.stride()[:-1]] for x in others]
    if any(x.storage_offset() for x in others) or widths[0] != widths[1]:
        query, *others = (x.contiguous() for x in tensors)
        if any(x.storage_offset() for x in others):
            raise RuntimeError("The provided qkv memory layout is not supported!")
    # With three separate memories, kernels get only the addresses.
    strides = query.new_empty(query.shape).stride()
    return [query.as_strided(query.shape, strides, query.storage_offset()), *others]


def _later(queries: int, keys: int, kind: str) -> torch.Tensor:
    """Return where a token must not attend, for causal masks from the top left or bottom right."""
    ahead = keys - queries if kind.endswith("causal_bottom_right") else 0
    assert kind.endswith("causal") or ahead >= 0
    return torch.ones(queries, keys, dtype=torch.bool).triu(1 + ahead)


def _rotate(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **settings: Any,
) -> torch.Tensor:
    """Turn `[s, b, heads, width]`, or `[t, heads, width]` of thd, as the fused kernels do."""
    assert fused
    if tensor_format == "thd":
        assert cu_seqlens is not None
        lengths = cu_seqlens.diff().tolist()
        rows = torch.cat(
            [freqs[:length, 0] for length in lengths]
        )  # each restarts at position 0
        assert len(rows) == len(t)
    else:
        rows = freqs[: len(t)]
    first, second = t.chunk(2, dim=-1)
    return t * rows.cos() + torch.cat([-second, first], dim=-1) * rows.sin()


def _norm(base: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return torch's norm with the arguments that Megatron passes to Transformer Engine's."""

    def init(
        self: torch.nn.Module, *sizes: int, eps: float = 1e-5, **settings: Any
    ) -> None:
        named = (settings.get("normalized_shape"), settings.get("hidden_size"))
        [size] = {*sizes, *(size for size in named if size)}
        base.__init__(self, size, eps)

    return type(base.__name__, (base,), {"__init__": init})


_REAL: dict[str, Any] = {
    "apply_rotary_pos_emb": _rotate,
    "DotProductAttention": DotProductAttention,
    "LayerNorm": _norm(torch.nn.LayerNorm),
    "RMSNorm": _norm(torch.nn.RMSNorm),
}


class _Anything(type):
    """Metaclass of classes that have any attribute and accept any arguments."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _Module(ModuleType):
    """A module in which every name is a module or a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _REAL:
            return _REAL[name]
        if name == "get_cpu_offload_context":
            return lambda *args, **kwargs: (nullcontext(), None)
        if name.islower():
            return sys.modules.get(f"{self.__name__}.{name}") or _made(
                f"{self.__name__}.{name}"
            )
        stand_in = _Anything(name, (), {"__init__": lambda *args, **kwargs: None})
        setattr(self, name, stand_in)
        return stand_in


def _made(name: str) -> ModuleType:
    module = _Module(name)
    module.__path__ = []
    module.__version__ = _VERSION
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module
    return module


class _Finder:
    """Finds every module of Transformer Engine."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> Any:
        is_stood_in = name.partition(".")[0] in (
            "transformer_engine",
            "transformer_engine_torch",
        )
        return ModuleSpec(name, self, is_package=True) if is_stood_in else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _made(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are created when they are looked up."""


def install() -> None:
    """Let this process import Transformer Engine."""
    assert "megatron.core.extensions.transformer_engine" not in sys.modules
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
    version = importlib.metadata.version

    def versions(name: str) -> str:
        is_ours = name.replace("_", "-").startswith("transformer-engine")
        return _VERSION if is_ours else version(name)

    importlib.metadata.version = versions
