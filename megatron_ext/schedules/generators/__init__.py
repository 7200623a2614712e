"""One module for each schedule; `registry.py` finds them."""
