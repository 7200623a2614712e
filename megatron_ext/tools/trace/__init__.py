"""Timelines of all ranks: recorded during training, merged and explained afterwards.

`tracing/recorder.py` writes one file for each rank, `aggregate.py` merges them into one Chrome
trace, `report.py` creates a page, and `forecast.py` predicts other schedules. Reading imports only
the standard library, so these commands start fast, on any machine.
"""
