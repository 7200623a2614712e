"""Every feature on every release of the range; see `run.sh`."""
