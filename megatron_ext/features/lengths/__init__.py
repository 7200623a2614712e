"""Micro-batches of unequal lengths: ordered by cost, and distributed over replicas."""
