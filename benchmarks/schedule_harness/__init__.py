"""Runs pipeline schedules of several systems on emulated stages, side by side.

Real processes, autograd and messages; only the computation is emulated, by sleeping, so that a
laptop can tell schedules and runtimes apart. `benchmarks/schedules.py` is the command.

    ops.py        what ranks record, and how long ops have to take
    stage.py      the emulated stage, and the probe that records what ran when and what is alive
    systems.py    what is measured: the rows of the table
    megatron_core.py, torch_pipelining.py, own.py    one step of each system, on one rank
    noise.py, late.py    what disturbs ops and messages
    scenarios.py  systems side by side in disturbed steps
    launch.py     starts the ranks
    wakeup.py     what waking a process costs on this machine
    comparisons.py, bound.py, tried.py    which orders are compared, and what no order can exceed
    rank.py       the measurements on one rank
    metrics.py    what follows from the records of all ranks
    report.py     table and picture
"""
