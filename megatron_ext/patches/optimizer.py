"""A patch on the distributed optimizer: its reshardable checkpoints."""

from __future__ import annotations

from typing import Any

from megatron_ext.patches.registry import Args, Call, Kwargs, Patch

__all__ = ["PATCHES"]


def _keep_padding_of_buckets(call: Call, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Gather each buffer with the padding at the end of its buckets, as parameters are indexed.

    Only within this call: the other formats store sizes without the padding.
    """
    sized = [
        *((buffer, buffer.numel) for buffer in instance.buffers),
        *(
            (bucket, bucket.grad_data.numel())
            for buffer in instance.buffers
            for bucket in buffer.buckets
        ),
    ]
    before = [owner.numel_unpadded for owner, _ in sized]
    for owner, padded in sized:
        owner.numel_unpadded = padded
    try:
        return call(*args, **kwargs)
    finally:
        for (owner, _), unpadded in zip(sized, before, strict=True):
            owner.numel_unpadded = unpadded


PATCHES = (
    Patch(
        id="optimizer.padding_of_reshardable",
        target="megatron.core.optimizer.distrib_optimizer:"
        "DistributedOptimizer.sharded_param_state_fully_reshardable",
        fn=_keep_padding_of_buckets,
        until="0.20",
        reason="gathers states without the padding between buckets but reads them at offsets that "
        "include it: behind a padded bucket (tied embeddings have their own) it saves parameters "
        "with parts of their neighbours",
    ),
)
