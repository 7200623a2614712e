"""Tensor transports between pipeline ranks.

`native` loads the C++ core `_C`: shared memory, TCP and RDMA links, and the doorbells that wake a
process when a message arrives. Importing this package imports neither torch nor native code.
"""
