"""Starts a training job on one or more machines, monitors it, and stops it as a whole.

    megatron-ext launch --hostfile hosts.txt -- pretrain_gpt.py FLAGS

`hostfile`, `slurm` and `plan` turn text and flags into one command per host, and `jobs` implements
`launch`. `attempts` runs the plan and restarts the job after a failure. `supervise` starts one
attempt and watches it through `agents`, with one connection per host through ssh, srun or a local
process. At the other end, the `agent` checks its host (`fitness`), receives its work as JSON on
standard input, and starts torchrun (`elastic`). When its standard input closes, the agent kills all
of the job's processes, so that none are left if the launcher dies. Processes are never looked up or
killed by name. `display` shows the ranks' output, `failures` determines which failure explains the
others, and `manage` implements `stop`, `status` and `logs`.

This package uses only the standard library and psutil, except for `elastic`, which runs torchrun
and therefore imports torch. Errors that a user can fix raise a `LaunchError`, whose one-line
message includes the remedy.
"""
