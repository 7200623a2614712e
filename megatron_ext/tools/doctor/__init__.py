"""Checks whether a machine or every host in a hostfile is fit for training; suggests remedies.

The command is `megatron-ext doctor`. Each check is a function that yields diagnoses. A diagnosis
has a level, a finding, and a remedy if something is wrong.
"""
