"""The harness of all benchmarks: commands, ranks, emulated stages, and pipelines side by side.

Processes, autograd and messages are real; only the computation is emulated by sleeping, so that a
laptop can tell schedules and runtimes apart. On an emulated device, the device takes the time
instead.

`systems.py` lists the systems to measure; the module named after a system runs its steps on a rank.
`ranks.py` starts the ranks, `stage.py` emulates their computation, and `ops.py` determines how long
it takes. `metrics.py` computes figures from their records, `scenarios.py` does so for disturbed
steps, and `comparison.py` makes a table of them.
"""
