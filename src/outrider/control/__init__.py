"""How much to speculate, and with whom: `drafter="adaptive"`.

* `acceptance`: how likely a draft is to be accepted
* `cost`: how long a step takes on this machine
* `policy`: how many drafts of each request are worth verifying
* `brake`: no drafts where they were measured to be slower than none
* `adaptive`: all of it, as a drafter that chooses among drafters
* `tiers`: SGLang's own rule, to compare with
"""

from outrider.control.acceptance import Acceptance
from outrider.control.adaptive import AdaptiveDrafter, Step, adaptive_drafter
from outrider.control.brake import Brake
from outrider.control.cost import Curve, StepCost
from outrider.control.policy import Choice, choose
from outrider.control.tiers import TieredDrafter

__all__ = [
    "Acceptance",
    "AdaptiveDrafter",
    "Brake",
    "Choice",
    "Curve",
    "Step",
    "StepCost",
    "TieredDrafter",
    "adaptive_drafter",
    "choose",
]
