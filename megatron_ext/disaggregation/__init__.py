"""Forward/backward disaggregation: forward and backward passes run in different processes.

`config/roles.py` maps ranks to roles. `worlds.py` turns the processes in each role into an ordinary
Megatron job. `step.py` runs the table from `schedules/generators/fbd.py` and exchanges tensors and
weights between the roles.
"""
