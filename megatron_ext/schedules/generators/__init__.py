"""One module per schedule; `catalog.py` imports them all."""
