"""Runs one micro-batch's forward pass and another's backward pass as one action, a pair."""
