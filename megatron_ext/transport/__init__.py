"""Carrying tensors between pipeline ranks.

`native` gives access to the C++ core `_C`: shared-memory segments and the futex doorbells that wake
a process when something arrived in one. Importing this package loads neither torch nor native code.
"""
