"""Which settings? Those that this machine, this model and this traffic prefer, by measurement.

`candidates.py` is what can be set, `halving.py` how the budget is spent, `profile.py` writes the
profile with its reasons, `run.py` is the command.
"""
