"""`megatron-ext compare`: trains a recipe under several pipelines and compares the results.

`recipe` splits a command line into the flags that all runs share and the flags that a candidate
adds. `rounds` orders the runs, and `run` starts each one through `launch`. `run_records` reads the
ranks' records, `tolerances` defines how close two runs must be, `outcome` judges the runs, `locate`
finds the first tensor that differs, and `text` and `page` show the answer.
"""
