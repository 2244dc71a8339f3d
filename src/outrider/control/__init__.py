"""How much to speculate, and with whom: `drafter="adaptive"`. New, and not benchmarked yet.

* `acceptance`: how likely a draft is to be accepted
* `cost`: how long a step takes on this machine
* `policy`: how many drafts of each request are worth verifying
* `adaptive`: all of it, as a drafter that chooses among drafters
"""

from outrider.control.acceptance import Acceptance
from outrider.control.adaptive import AdaptiveDrafter, adaptive_drafter
from outrider.control.cost import Curve, StepCost
from outrider.control.policy import Choice, choose

__all__ = [
    "Acceptance",
    "AdaptiveDrafter",
    "Choice",
    "Curve",
    "StepCost",
    "adaptive_drafter",
    "choose",
]
