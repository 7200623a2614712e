"""Imports Megatron-Bridge once for all ranks forked from this process."""

from tests.hosts import stand_ins

stand_ins.install()

import megatron.bridge.training.gpt_step  # noqa: E402
import megatron.bridge.training.pretrain  # noqa: E402, F401
