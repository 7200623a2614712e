"""Patches on BERT."""

from __future__ import annotations

import logging
import sys
from typing import Any

from megatron_ext.patches.conditions import without_te
from megatron_ext.patches.registry import Patch

__all__ = ["PATCHES"]

_LOG = logging.getLogger(__name__)
_SPECS = "megatron.core.models.bert.bert_layer_specs"


def _local_spec(_original: Any) -> Any:
    """Let the script's default be Megatron's own layers, the only ones that are there."""
    specs = sys.modules[_SPECS]
    _LOG.info("BERT's default layers are Megatron's own: Transformer Engine is not installed")
    return specs.bert_layer_local_spec


PATCHES = (
    Patch(
        id="bert.te_spec",
        target=f"{_SPECS}:bert_layer_with_transformer_engine_spec",
        kind="set",
        fn=_local_spec,
        creates=True,
        when=without_te,
        reason="pretrain_bert.py imports this name in any case, and without Transformer Engine the "
        "module's __getattr__ raises ImportError",
    ),
)
