"""Runs the forward of one micro-batch and the backward of another as one action, a pair."""
