"""Records training (`--trace`) and stops training runs that hang (`--hang-timeout`).

`megatron_ext/tools/trace` reads the records; nothing else in the package imports it.
"""
