"""Is speculation worth it? Speed of engines beside each other, where their answers agree.

`workloads.py` has the texts, `measure.py` runs the engines in turn, `result.py` reckons, `page.py`
is the report, `run.py` the command.
"""
