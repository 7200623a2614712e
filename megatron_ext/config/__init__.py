"""The configuration of a run: flags, combinations that are refused, and how to build the model."""
