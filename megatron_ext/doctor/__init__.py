"""Says whether a machine, or every host of a hostfile, is fit to train, and what to do if not.

The command is `megatron-ext doctor`. Each check is a function that returns `Finding`s: what it
found, whether that is good, and the remedy if it is not.
"""
