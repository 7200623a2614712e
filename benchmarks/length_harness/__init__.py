"""Steps of micro-batches of unequal lengths on emulated stages, packed in several ways."""
