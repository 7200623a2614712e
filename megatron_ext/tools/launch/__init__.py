"""Starts a training job on this machine or on many, monitors it, and ends it as a whole.

    megatron-ext launch --hostfile hosts.txt -- pretrain_gpt.py FLAGS

`hostfile`, `slurm` and `plan` turn text and flags into one command for each host; `jobs` implements
`launch`. `attempts` runs the plan, and repeats it after a failure; `supervise` starts one attempt
and watches it through `agents`, one connection to each host, by ssh, srun or a plain process. The
`agent` at the other end checks its host (`fitness`), receives its work as JSON on its standard
input, starts torchrun (`elastic`) and ends every process of the job as soon as that input ends, so
a launcher that dies leaves no processes. No process is found or killed by name. `display` shows the
output of the ranks, `failures` decides which failure explains the others, and `manage` implements
`stop`, `status` and `logs`.

Everything here uses only the standard library and psutil; only `elastic`, which is torchrun,
imports torch. Mistakes that a user can fix raise a `LaunchError`: one line with the remedy.
"""
