"""The harness of all benchmarks: commands, ranks, emulated stages, and pipelines side by side.

Processes, autograd and messages are real; only the computation is emulated, by sleeping, so that a
laptop can distinguish schedules and runtimes; on an emulated device, that takes their time.

    command.py    options, tables, ratios and files of figures
    ops.py        the records of ranks, and how long ops and messages take: all kinds of draws
    stage.py      the emulated stage, and the probe that records its ops and live activations
    systems.py    the systems to be measured, one for each row of the table
    megatron_core.py, torch_pipelining.py, own.py    one step of each system, on one rank
    device_probe.py    the probe of a device behind its host
    experts.py    stages with experts, whose exchanges pairs hide
    comparison.py    systems side by side, and their table
    scenarios.py    systems in disturbed steps, and the bound of any order
    planned.py    layouts of the planner, run as stages that sleep what their layers cost
    trained.py    trainings on the emulated device, beside the forecasts of both plans
    ranks.py      starts the ranks, and measures on each
    metrics.py    the metrics, from the records of all ranks
"""
