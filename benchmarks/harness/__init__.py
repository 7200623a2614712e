"""The harness of all benchmarks: commands, ranks, emulated stages, and pipelines side by side.

Processes, autograd and messages are real; only the computation is emulated, by sleeping, so that a
laptop can distinguish schedules and runtimes; on an emulated device, that takes their time.

`systems.py` has what is measured, a module of its name how a step of it runs on a rank. `ranks.py`
starts the ranks, `stage.py` is what they compute, `ops.py` how long that takes. `metrics.py` makes
figures of their records, `scenarios.py` those of disturbed steps, `comparison.py` a table of them.
"""
