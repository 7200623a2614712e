"""Runs pipeline schedules of several systems on emulated stages, side by side.

Processes, autograd and messages are real; only the computation is emulated, by sleeping, so that a
laptop can distinguish schedules and runtimes. `benchmarks/schedules.py` is the command;
with `--device` an emulated device takes their time.

    ops.py        the records of ranks, and how long ops and messages take: all kinds of draws
    stage.py      the emulated stage, and the probe that records its ops and live activations
    systems.py    the systems to be measured, one for each row of the table
    megatron_core.py, torch_pipelining.py, own.py    one step of each system, on one rank
    device_probe.py    the probe of a device behind its host
    experts.py    stages with experts, whose exchanges pairs hide
    scenarios.py    systems in disturbed steps, and the bound of any order
    planned.py    layouts of the planner, with a time for each stage
    trained.py    trainings on the emulated device, beside the forecasts of both plans
    model_memory.py    what ranks of a training hold, beside the planner's forecast and tables
    ranks.py      starts the ranks, and measures on each
    metrics.py    the metrics, from the records of all ranks
"""
