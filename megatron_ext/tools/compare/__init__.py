"""`megatron-ext compare`: trains a recipe under several pipelines, and holds them together.

`recipe` cuts a command line into what all runs share and what a candidate adds, `plan` orders the
runs, `run` starts each as `launch` does, `steps` reads what its ranks recorded, `equality` says
what a pair of runs promises, `outcome` judges, `text` and `page` show it.
"""
