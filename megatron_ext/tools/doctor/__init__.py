"""Checks whether a machine, or every host in a hostfile, is fit to train, and names remedies.

The command is `megatron-ext doctor`. Each check is a function that yields diagnoses: an
observation, a level, and a remedy if something is wrong.
"""
