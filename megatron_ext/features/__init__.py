"""Features, one folder each, that extend the core; `megatron_ext/feature_list.py` lists them."""
