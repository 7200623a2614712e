"""Warns about a program's hooks, and its replacements of calls, that do not run in pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, ref

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model

from megatron_ext.config.active import report_departure
from megatron_ext.runtime.module_calls import (
    hooks_of,
    hooks_of_all_modules,
    name_of,
    program_call_of,
    wrappers_around,
)

if TYPE_CHECKING:
    import torch

# A schedule plan calls these modules' parts, but never the modules themselves.
_RUN_IN_PARTS = (
    TransformerBlock,
    TransformerLayer,
    MoELayer,
    MultiTokenPredictionBlock,
    MultiTokenPredictionLayer,
)
_REASON = "with --overlap-moe-expert-parallel-comm, Megatron runs these modules' parts one by one"
_PARTS = "the parts (self_attention, router, experts)"


class SkippedHooks:
    """Reports each module once, at the first step with pairs that skips something of it."""

    def __init__(self) -> None:
        # A chunk's model -> paths and modules that run in parts. Searching a model takes
        # milliseconds, so it is searched once.
        self._modules: WeakKeyDictionary[
            torch.nn.Module, list[tuple[str, ref[torch.nn.Module]]]
        ] = WeakKeyDictionary()
        self._with_hooks: WeakSet[torch.nn.Module] = WeakSet()
        """Modules whose hooks have been reported."""
        self._with_forward: WeakSet[torch.nn.Module] = WeakSet()
        """Modules whose own `forward` has been reported."""
        self._classes: WeakSet[type] = WeakSet()
        """Classes whose `forward` or `__call__` has been reported."""
        self._hooks_of_all_modules: set[int] = set()
        """Torch's numbers of the reported hooks on all modules; several may have one name."""

    def log(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Log hooks and calls that a training step skips because plans call only modules' parts.

        Call this before every step, because programs add hooks between steps.
        """
        with_hooks: list[str] = []
        replaced: list[str] = []
        for path, module in self._run_in_parts(chunks):
            if module not in self._with_hooks and any(hooks_of(module)):
                self._with_hooks.add(module)
                with_hooks.append(path)
            replaced += self._replaced_calls(path, module)
        if with_hooks:
            report_departure(
                f"hooks on {_listed(with_hooks)} do not run: {_REASON}; register the hooks on "
                f"{_PARTS}, or remove the flag"
            )
        if replaced:
            report_departure(
                f"the program's own functions do not run ({_listed(replaced)}): {_REASON}; "
                f"change {_PARTS} instead, or remove the flag"
            )
        unreported = []
        for number, hook in hooks_of_all_modules():
            if number not in self._hooks_of_all_modules:
                self._hooks_of_all_modules.add(number)
                unreported.append(name_of(hook))
        if unreported:
            kinds = ", ".join(kind.__name__ for kind in _RUN_IN_PARTS)
            report_departure(
                f"hooks on all modules ({_listed(unreported)}) do not run on {kinds} and the "
                f"model itself: {_REASON}; remove the flag if the hooks need them"
            )

    def _run_in_parts(
        self, chunks: Sequence[torch.nn.Module]
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        for chunk in chunks:
            # Plans are built from the model inside its wrappers.
            for wrapper in wrappers_around(chunk):
                yield type(wrapper).__name__, wrapper
            model = unwrap_model(chunk)
            if model not in self._modules:
                self._modules[model] = _modules_in_parts(model)
            for path, reference in self._modules[model]:
                module = reference()
                if module is not None:
                    yield path, module

    def _replaced_calls(self, path: str, module: torch.nn.Module) -> Iterator[str]:
        """Yield a module's or its class's calls that the program has replaced or wrapped."""
        replacement: Any = vars(module).get("forward")
        if replacement is not None and module not in self._with_forward:
            function = program_call_of(replacement)
            if function is not None:
                self._with_forward.add(module)
                yield f"forward of {path} ({name_of(function)})"
        kind = type(module)
        if kind in self._classes:
            return
        for name in ("forward", "__call__"):
            function = program_call_of(getattr(kind, name))
            if function is not None:
                self._classes.add(kind)
                yield f"{name} of {kind.__name__} ({name_of(function)})"


def _listed(names: Sequence[str]) -> str:
    """Return the distinct names: every chunk has its own wrappers."""
    return ", ".join(dict.fromkeys(names))


def _modules_in_parts(
    model: torch.nn.Module,
) -> list[tuple[str, ref[torch.nn.Module]]]:
    modules = []
    for path, module in model.named_modules():
        # The model itself is not called either: its forward step only builds a plan.
        if module is model or isinstance(module, _RUN_IN_PARTS):
            modules.append((path or type(module).__name__, ref(module)))
    return modules
