"""Commands used around training: launch, trace, doctor. No other code imports them."""
