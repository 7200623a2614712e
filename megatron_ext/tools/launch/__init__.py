"""Starts a training job on this machine or on many, monitors it, and ends it as a whole.

    megatron-ext launch --hostfile hosts.txt -- pretrain_gpt.py FLAGS

`hostfile`, `slurm` and `plan` turn text and flags into one command for each host; `jobs` follows
the flags of `launch`. `attempts` runs the plan, again after a failure; `supervise` starts one
attempt and watches it through `agents`, one connection to each host, by ssh, srun or a plain
process. The `agent` at the other end looks at its host (`fitness`), gets its work as JSON on its
standard input, starts torchrun (`elastic`) and ends every process of the job as soon as that input
ends: a launcher that died leaves nothing behind. No process is found or killed by name. `display`
shows what the ranks print, `failures` decides which failure explains the others, and `manage` is
`stop`, `status` and `logs`.

Everything here is the standard library and psutil; torch is imported by `elastic` alone, which is
torchrun. Mistakes that a user can mend end in a `LaunchError`: one line with the remedy.
"""
