"""Converts Megatron-Bridge's configuration to Megatron's arguments and back.

The checks whether a schedule fits a job, and the settings that host it, use upstream's argument
names (`megatron_ext/config/entrances.py`). Bridge has these as fields of several
dataclasses, mostly under the same names.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from megatron_ext.config.flags import FIELD_OF
from megatron_ext.config.incompatible import MEGATRON_FIELDS
from megatron_ext.config.stages import layout_text

# Parts of a `ConfigContainer`. If two parts have a field of the same name, the later part wins.
_SECTIONS = (
    "rng",
    "optimizer",
    "ddp",
    "dist",
    "checkpoint",
    "validation",
    "train",
    "model",
    "model.transformer",
)

# Switches in several parts; Bridge enables the feature if any part sets it.
_EITHER = ("use_distributed_optimizer", "use_megatron_fsdp", "use_torch_fsdp2")
_PACKED = ("enable_offline_packing", "enable_in_batch_packing")


class FieldPlace(NamedTuple):
    """The dataclass field that holds a setting."""

    name: str
    """Dotted, as users write it."""
    owner: Any
    field: str


class Settings:
    """Bridge's `ConfigContainer` under upstream's argument names; `write` changes it."""

    def __init__(self, container: Any) -> None:
        self.container = container
        self._places: dict[str, FieldPlace] = {}
        for section in _SECTIONS:
            owner = container
            for name in section.split("."):
                owner = getattr(owner, name, None)
            for field in fields(owner) if is_dataclass(owner) else ():
                place = FieldPlace(f"{section}.{field.name}", owner, field.name)
                self._places[field.name] = place
        for dest, known in MEGATRON_FIELDS.items():
            if known in self._places:
                self._places[dest] = self._places[known]
        self._kept: dict[tuple[int, str], tuple[FieldPlace, Any]] = {}

    def arguments(self, *, world_size: int, rank: int) -> Namespace:
        """Return the settings under upstream's argument names."""
        found = {dest: getattr(place.owner, place.field) for dest, place in self._places.items()}
        for name in _EITHER:
            parts = [getattr(self.container, part, None) for part in ("ddp", "optimizer", "dist")]
            found[name] = any(getattr(part, name, False) for part in parts)
        layout = layout_text(found.get("pipeline_model_parallel_layout"))
        found["pipeline_model_parallel_layout"] = layout
        if layout is not None:  # the layout sets the stages per rank
            found["num_virtual_stages_per_pipeline_rank"] = None
        found["data_parallel_size"] = getattr(self.container, "data_parallel_size", None)
        # Rules know packed sequences by Megatron's flag.
        data = getattr(self.container, "dataset", None)
        found["sft"] = any(getattr(data, name, False) is True for name in _PACKED)
        return Namespace(**{**found, "world_size": world_size, "rank": rank})

    def write(self, values: Mapping[str, Any]) -> None:
        """Set values by upstream's argument names; `restore` undoes it."""
        self.keep(values)
        for dest, value in values.items():
            place = self._places[dest]
            setattr(place.owner, place.field, value)

    def keep(self, names: Iterable[str]) -> None:
        """Save settings for `restore`, including those that Bridge itself fills in."""
        for place in (self._places[dest] for dest in names if dest in self._places):
            value = getattr(place.owner, place.field)
            self._kept.setdefault((id(place.owner), place.field), (place, value))

    def restore(self) -> None:
        """Restore all saved values."""
        for place, value in self._kept.values():
            setattr(place.owner, place.field, value)
        self._kept.clear()

    def in_fields(self, message: str, *, from_python: bool) -> str:
        """Replace Megatron's flags in a message with Bridge's configuration fields.

        And our flags with fields of `PipelineConfig`, if the configuration is `from_python`.
        """

        def named(match: re.Match[str]) -> str:
            flag = match[0]
            dest = flag[2:].replace("-", "_")
            if dest in self._places:
                return self._places[dest].name
            if dest.removeprefix("no_") in self._places:
                return f"{self._places[dest.removeprefix('no_')].name} False"
            return FIELD_OF.get(flag, flag) if from_python else flag

        return re.sub(r"--[a-z0-9][a-z0-9-]*", named, message)
