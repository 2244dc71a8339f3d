"""Is speculation changing answers? `outrider audit` asks two engines the same and compares.

`compare.py` finds where two greedy answers part, and says whether rounding explains it;
`distribution.py` tests whether sampled answers follow one distribution; `run.py` asks, `result.py`
judges, `page.py` shows.
"""

from outrider.audit.compare import (
    Comparison,
    Divergence,
    Tolerance,
    Verdict,
    compare,
    depart,
    tolerance,
)

__all__ = ["Comparison", "Divergence", "Tolerance", "Verdict", "compare", "depart", "tolerance"]
