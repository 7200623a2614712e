"""Starts a training job on every host of a hostfile, monitors it, and ends it as a whole.

    megatron-ext launch --hostfile hosts.txt -- pretrain_gpt.py FLAGS

`hostfile` and `plan` are pure: text and flags in, one command for each host out. The launcher
(`supervise`) keeps one connection to each host (`connection`: the system's ssh, or a plain process
for this machine) to an `agent` there, which gets its work as JSON on its standard input, starts
torchrun and ends every process of the job as soon as that input ends: a launcher that died leaves
nothing behind. Nothing is ever found or killed by name.

Everything here is the standard library; torch is imported by `elastic` alone, which is torchrun.
"""
