"""Records the operators that run inside one module, with a fingerprint of each result.

torch's DebugMode observes every operator in an action. Hooks on the module mark where its operators
begin and end. DebugMode is active only during a single action, because it makes every operator
several times slower.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_ext.tracing.fingerprint import Fingerprint, Fingerprints
from megatron_ext.tracing.operator_files import (
    Operator,
    OperatorFile,
    OperatorHeader,
    Place,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megatron_ext.schedules.table.actions import Action
    from megatron_ext.tracing.digest_files import Header

_KINDS = {"forward": ("F",), "backward": ("B", "I")}
"""Action kinds, by a place's direction."""
_COLLECTIVES = (
    "c10d",
    "c10d_functional",
    "_c10d_functional",
    "_c10d_functional_autograd",
)
"""Namespaces of operators that may return before their results have arrived."""


class OperatorRecorder:
    """Records the operators at one place on one rank."""

    def __init__(self, place: Place, folder: Path, header: Header) -> None:
        self.place = place
        self._folder = folder
        self._header = header
        self._fingerprints = Fingerprints()
        self._operators: list[tuple[str, list[list[int]], Fingerprint]] = []
        """All operators in the action so far."""
        self._first: int | None = None
        """Index of the module's first operator; None until the module begins."""
        self._end: int | None = None
        self._mode: ExitStack | None = None
        """Active during the action."""
        self._action: Action | None = None
        self._recorded: dict[int, list[Operator]] = {}
        """Slice of the micro-batch -> its operators, in execution order."""

    def begin_action(self, iteration: int, microbatch: int, action: Action) -> None:
        """Record an action's operators if the place is in this action.

        Args:
            iteration: The training step's number.
            microbatch: The number of the action's micro-batch within the global batch.
            action: The action that begins.
        """
        place = self.place
        is_microbatch = iteration == place.iteration and microbatch == place.microbatch
        is_direction = action.kind in _KINDS[place.direction]
        is_recording = self._mode is not None
        if is_recording or not is_microbatch or not is_direction:
            return
        # Import this here, because recording digests does not need it and also works
        # with older torch releases.
        from torch.utils._debug_mode import DebugMode

        self._operators.clear()
        self._action = action
        self._first = None
        self._end = None
        self._mode = ExitStack()
        # The hook below records results, so DebugMode does not need to describe them.
        self._mode.enter_context(DebugMode(record_output=False))
        hooks = DebugMode.dispatch_hooks(record_hook=self._record)
        self._mode.enter_context(hooks)

    def begin_module(self) -> None:
        """Mark where the module's operators begin."""
        if self._mode is not None and self._first is None:
            self._first = len(self._operators)

    def end_module(self) -> None:
        """Mark where the module's operators end."""
        if self._mode is not None and self._first is not None:
            self._end = len(self._operators)

    def end_action(self, action: Action) -> None:
        """Write the module's operators if the module ran in this action."""
        # In a pair, the partner's end must not end the recording.
        if self._mode is None or action is not self._action:
            return
        self.stop()
        if self._first is None or self._end is None:
            return
        operators = []
        # Read the fingerprints only now, because each read waits for the device.
        for name, shapes, fingerprint in self._operators[self._first : self._end]:
            norm, *projections = fingerprint.sizes.tolist()
            operator = Operator(name, shapes, fingerprint.text, norm, projections)
            operators.append(operator)
        header = self._header
        written = OperatorHeader(
            header.rank,
            header.host,
            header.tensor,
            header.context,
            str(action),
            str(self.place),
        )
        # Rewrite the file after each slice of the micro-batch, so that it is always complete.
        self._recorded[action.slice] = operators
        of_all_slices: list[Operator] = []
        for operators_of_slice in self._recorded.values():
            of_all_slices += operators_of_slice
        write(self._folder, OperatorFile(written, of_all_slices))

    def stop(self) -> None:
        """Stop recording operators, because the action has completed or failed."""
        if self._mode is not None:
            self._mode.close()
            self._mode = None

    def _record(
        self,
        operator: Any,
        _types: Sequence[type],
        _args: Sequence[Any],
        _kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        """Keep an operator's name and fingerprint if its result can be compared."""
        # Skip views (they compute nothing), empty tensors (their bits are arbitrary) and
        # collectives (their results may not have arrived).
        if getattr(operator, "is_view", False) or operator.namespace in _COLLECTIVES:
            return
        if "empty" in operator.__name__:
            return
        tensors: list[torch.Tensor] = []
        for leaf in torch.utils._pytree.tree_leaves(result):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.is_floating_point() and leaf.numel():
                tensors.append(leaf)
        if tensors:
            name = f"{operator.namespace}.{operator.__name__}"
            shapes = [list(tensor.shape) for tensor in tensors]
            fingerprint = self._fingerprints.of(tensors[0])
            self._operators.append((name, shapes, fingerprint))
