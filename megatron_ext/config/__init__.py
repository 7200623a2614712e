"""A run's configuration: flags, rejected combinations, and how to build the model."""
