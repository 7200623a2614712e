"""The transformer layer of a GPT with hyper-connections, from megatron-core 0.20 on.

    PYTHONPATH=examples/boundaries torchrun --nproc-per-node 4 -m megatron_ext pretrain_gpt.py \
        --enable-mhc-connections --spec streams LAYER --pipeline-schedule zb-v ...

Upstream implements the layer but has no flag that builds it.
"""

from dataclasses import replace
from importlib.util import find_spec

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.hyper_connection import HyperConnectionModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import HyperConnectionTransformerLayer

_plain = (
    get_gpt_layer_with_transformer_engine_spec()
    if find_spec("transformer_engine") is not None
    else get_gpt_layer_local_spec()
)

LAYER = ModuleSpec(
    module=HyperConnectionTransformerLayer,
    submodules=replace(
        _plain.submodules,
        self_attention_hyper_connection=HyperConnectionModule,
        mlp_hyper_connection=HyperConnectionModule,
    ),
)
