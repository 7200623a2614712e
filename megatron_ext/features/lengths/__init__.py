"""Micro-batches of unequal lengths: ordered by cost, and dealt out to replicas."""
