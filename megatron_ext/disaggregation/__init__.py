"""Forward/backward disaggregation: forward passes and backward passes in different processes.

`ranks.py` says which process does what, `config/disaggregation_flags.py` reads the command line,
`worlds.py` makes a job of Megatron's own out of the processes of each role, and `step.py` runs the
table of `schedules/generators/fbd.py` with tensors and weights going from role to role.
"""
