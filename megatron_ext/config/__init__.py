"""What a run was asked for: flags, what they exclude, and what the model has to be built with."""
