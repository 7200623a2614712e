"""Timelines of all ranks: recorded during training, merged and explained afterwards.

`tracing/recorder.py` writes one file for each rank, `aggregate.py` merges them into one Chrome
trace, `report.py` makes a page, and `forecast.py` predicts other schedules. Reading imports the
standard library only, so these commands start fast, on any machine.
"""
