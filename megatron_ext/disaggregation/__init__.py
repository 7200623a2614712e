"""Forward/backward disaggregation: forward passes and backward passes in different processes.

`config/roles.py` maps ranks to roles, `worlds.py` turns the processes of each role into an
ordinary Megatron job, and `step.py` runs the table of `schedules/generators/fbd.py`, exchanging
tensors and weights between the roles.
"""
