"""One module for each schedule; `catalog.py` finds them."""
