"""`outrider explain`: one generation, step by step, in colour.

An engine (`in_process.py`, `server.py`) gives a `Recording`: ids only. `walk.py` makes a `Walk` of
it: texts, and the fate of every draft. `terminal.py` and `page.py` show it; `tree.py` draws.
"""

from outrider.explain.walk import Walk, WalkStep, make_walk

__all__ = ["Walk", "WalkStep", "make_walk"]
