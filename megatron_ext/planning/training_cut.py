"""Computes the cut for `--pipeline-layout auto` from the model, the schedule and the flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_ext.errors import ScheduleError
from megatron_ext.planning.calibration import parts_of
from megatron_ext.planning.hardware import DEVICES
from megatron_ext.planning.layer_costs import FULL, Sharding
from megatron_ext.planning.model_flags import sizes_of_arguments
from megatron_ext.schedules.table.cuts import cut, layout_of

if TYPE_CHECKING:
    from argparse import Namespace

    from megatron_ext.schedules.table.placement import Placement


def layout_for(args: Namespace, placement: Placement) -> str:
    """Return the layout that minimizes the busiest rank's work, in Megatron's notation.

    The layers' relative costs barely depend on the device, so an `h100` is assumed.

    Raises:
        ArgumentsError: The arguments do not contain the model size.
        ScheduleError: The layers cannot be divided into the stages.
    """
    model = sizes_of_arguments(args)
    sharding = Sharding(
        tensor=args.tensor_model_parallel_size,
        context=getattr(args, "context_parallel_size", None) or 1,
        expert=getattr(args, "expert_model_parallel_size", None) or 1,
        micro_batch=getattr(args, "micro_batch_size", None) or 1,
        sequence=model.sequence or 4096,
    )
    mode = frozenset[str]()
    granularity = getattr(args, "recompute_granularity", None)
    if granularity == "full":
        mode = FULL
    elif granularity == "selective":
        # Core attention is Megatron's default for selective recomputation.
        modules = getattr(args, "recompute_modules", None) or ("core_attn",)
        mode = frozenset(modules)
    layers, first, last = parts_of(model, sharding, DEVICES["h100"], mode)
    layer_works = [layer.work for layer in layers]
    # The last stage needs no layers if it has multi-token prediction.
    least_last = 0 if model.mtp_layers else 1
    try:
        counts = cut(
            layer_works,
            first.work,
            last.work,
            placement,
            least_last=least_last,
        )
    except ScheduleError as error:
        raise ScheduleError(
            f"--pipeline-layout auto: {error}; remove --pipeline-layout"
        ) from error
    return layout_of(counts, model.mtp_layers)
