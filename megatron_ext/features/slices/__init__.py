"""Micro-batches whose sequences run through the pipeline slice by slice (docs/lengths.md)."""
