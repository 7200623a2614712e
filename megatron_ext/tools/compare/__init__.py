"""`megatron-ext compare`: trains a recipe under several pipelines, and holds them together.

`recipe` cuts a command line into what all runs share and what a candidate adds. `rounds` orders the
runs, and `run` starts each as `launch` does. `run_records` reads what its ranks recorded,
`equality` says what a pair of runs promises, `outcome` judges, `locate` names the first tensor that
differs, and `text` and `page` show the answer.
"""
