"""Timelines of all ranks, which are recorded during training, and merged and explained afterwards.

`tracing/recorder.py` writes one file for each rank, `aggregate.py` merges the files into one Chrome
trace, `report.py` creates a page, and `forecast.py` predicts other schedules. Reading traces needs
only the standard library, so these commands start fast on any machine.
"""
