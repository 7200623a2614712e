"""Pipeline schedules as data: generated, validated, simulated and drawn.

One `Schedule` is a list of actions for each rank. `generate` makes one by name, `validate` proves
that it is correct, `simulate` says how long it takes and what it keeps in memory, `render` and
`svg` draw it, `lower` adds the communication that follows from it. All of this imports the standard
library only.

Words: a *rank* is a process of the pipeline. The model is cut into *stages*; a rank holds one or
more, its *chunks*. A step runs every *micro-batch* through all stages, forward and backward. With
*twins* two mirrored pipelines share all ranks. The *bubble* is the time that the busiest rank
waits.
"""

from megatron_ext.schedules.generators.catalog import generate, register, registered
from megatron_ext.schedules.representation.actions import Action, Kind, Schedule
from megatron_ext.schedules.representation.communication import lower
from megatron_ext.schedules.representation.costs import UNIT, Costs
from megatron_ext.schedules.representation.placement import Placement
from megatron_ext.schedules.representation.validation import Report, validate
from megatron_ext.schedules.search.simulate import Timeline, simulate

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
    "lower",
    "register",
    "simulate",
    "validate",
]
