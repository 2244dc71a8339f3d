"""How much to speculate, and with which drafter: `drafter="adaptive"`.

In the order of a step:

* `adaptive`: the drafter that chooses among drafters
* `acceptance`: the probability that a draft is accepted
* `plan`: the drafts of all drafters, joined into one tree per request
* `cost`: the time of a step on this machine; `curve` by rows, `estimate` a robust running average
* `policy`: which drafts are worth verifying
* `model_choice`: whether the draft model is worth its passes, for which requests, and how deep
* `step`: what a step did, and its line in a trace
* `scoring`: which drafts were right
* `slowdown`: no drafts while they are measured to be slower than plain decoding

And `tiers`: SGLang's own rule, for comparison.
"""

from outrider.control.acceptance import Acceptance
from outrider.control.adaptive import AdaptiveDrafter, adaptive_drafter
from outrider.control.cost import StepCost
from outrider.control.curve import Curve
from outrider.control.policy import Choice, choose
from outrider.control.slowdown import SlowdownGuard
from outrider.control.step import Step
from outrider.control.tiers import TieredDrafter

__all__ = [
    "Acceptance",
    "AdaptiveDrafter",
    "Choice",
    "Curve",
    "SlowdownGuard",
    "Step",
    "StepCost",
    "TieredDrafter",
    "adaptive_drafter",
    "choose",
]
