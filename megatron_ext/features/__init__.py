"""Features beside the core, a folder each; `megatron_ext/feature_list.py` lists where they join."""
