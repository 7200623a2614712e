"""Micro-batches that run through the pipeline part by part of their sequence (docs/slices.md)."""
