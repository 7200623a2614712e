"""Timelines of all ranks, recorded during training, then merged and explained.

`tracing/recorder.py` writes one file per rank, `aggregate.py` merges the files into one Chrome
trace, `report.py` creates a page, and `forecast.py` predicts other schedules' step times. Reading
traces needs only the standard library, so these commands start quickly on any machine.
"""
