"""`megatron-ext compare`: trains a recipe under several pipelines and compares the results.

`recipe` splits a command line into the flags shared by all runs and the flags that a candidate
adds. `rounds` decides the order of the runs, and `run` starts each one through `launch`.
`run_records` reads the ranks' records, `tolerances` defines how closely two runs must match,
`outcome` judges the runs, `locate` finds the first tensor that differs, and `text` and `page`
present the result.
"""
