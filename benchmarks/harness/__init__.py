"""The harness for all benchmarks: commands, ranks, emulated stages, and pipelines side by side.

Processes, autograd and messages are real. Only the computation is emulated by sleeping, so even a
laptop can tell schedules and runtimes apart. On an emulated device, the device spends the time
instead.

`systems.py` lists the systems to measure. The module named after a system runs its steps on a rank.
`ranks.py` starts the ranks, `stage.py` emulates their computation, and `ops.py` determines how long
it takes. `metrics.py` computes figures from their records, `scenarios.py` does the same for
disturbed steps, and `comparison.py` puts the figures in a table.
"""
