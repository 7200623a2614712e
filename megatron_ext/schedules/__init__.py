"""Pipeline schedules as data: generated, validated, simulated and drawn.

A `Schedule` holds a list of actions for every rank. `generate` builds one by name, `validate`
proves that it is correct, `simulate` computes its step time and memory, and `render` and `svg` draw
it. The entire package depends only on the standard library.

Terms: a *rank* is a process in the pipeline. The model is split into *stages*, and the stages on a
rank are its *chunks*. A step runs every *micro-batch* forward and backward through all stages. With
*twins*, two mirrored pipelines share all ranks. The *bubble* is the idle time on the busiest rank.
"""

from megatron_ext.schedules.generators.catalog import generate, register, registered
from megatron_ext.schedules.search.simulate import Timeline, simulate
from megatron_ext.schedules.table.actions import Action, Kind, Schedule
from megatron_ext.schedules.table.costs import UNIT, Costs
from megatron_ext.schedules.table.placement import Placement
from megatron_ext.schedules.table.validation import Report, validate

__all__ = [
    "UNIT",
    "Action",
    "Costs",
    "Kind",
    "Placement",
    "Report",
    "Schedule",
    "Timeline",
    "generate",
    "registered",
    "register",
    "simulate",
    "validate",
]
