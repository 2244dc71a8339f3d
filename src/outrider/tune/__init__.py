"""Which settings? Those that this machine, this model and this traffic prefer, by measurement.

`search.py` spends a budget of time on what can be set, `advice.py` makes a profile of what was
found, each value with its reason, `page.py` shows it, `server.py` starts a server to try on, and
`run.py` is the command.
"""
