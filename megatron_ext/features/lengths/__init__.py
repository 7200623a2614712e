"""Orders micro-batches of unequal lengths by cost and distributes them over replicas."""
