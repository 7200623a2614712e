"""Records training (`--trace`) and ends trainings that hang (`--hang-timeout`).

`megatron_ext/tools/trace` reads the records; nothing in the package imports it.
"""
