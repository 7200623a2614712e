"""The configuration of a run: flags, rejected combinations, and how to build the model."""
