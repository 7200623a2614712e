"""Checks on an NVIDIA GPU: `bash tests/gpu/run.sh`."""
