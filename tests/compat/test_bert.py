"""Each patch of the table, and what upstream does without it."""

from __future__ import annotations

import pytest

from tests.patches.single import without
from tests.ranks import run_ranks


def default_spec() -> None:
    from megatron.core.models.bert import bert_layer_specs as specs

    assert specs.bert_layer_with_transformer_engine_spec is specs.bert_layer_local_spec
    with without("bert.te_spec"), pytest.raises(ImportError, match="Transformer Engine"):
        _ = specs.bert_layer_with_transformer_engine_spec


def test_default_spec() -> None:
    run_ranks(1, default_spec)
