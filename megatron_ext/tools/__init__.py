"""Commands for use around training: launch, trace, doctor. No other code imports them."""
