"""Commands for use around training: launch, trace, doctor. No other code here imports them."""
