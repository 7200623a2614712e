"""Commands around a training: launch, trace, doctor. Nothing else in the package imports them."""
