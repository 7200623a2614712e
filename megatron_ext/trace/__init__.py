"""What each rank did when: recorded while a run trains, put together and explained afterwards.

`recorder.py` writes one file for each rank, `aggregate.py` makes one Chrome trace of them,
`report.py` a page, `forecast.py` predicts other schedules from them. Reading imports the standard
library only, so that these commands start at once, on any machine.
"""
