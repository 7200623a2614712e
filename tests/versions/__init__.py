"""Tests every feature on every supported release; see `run.sh`."""
