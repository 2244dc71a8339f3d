"""How much to speculate, and with which drafter: `drafter="adaptive"`.

In the order of a step:

* `control`: decides each step; `decision` has the values that go in and come out
* `adaptive`: the same as a drafter, and how both are made
* `acceptance`: the probability that a draft is accepted
* `lookups`: the CPU's lookups, which index texts when they are asked
* `plan`: the drafts of all drafters, joined into one tree per request
* `cost`: the time of a step on this machine; `curve` by rows, `estimate` a robust running average
* `policy`: which drafts are worth verifying
* `model_choice`: whether the draft model is worth its passes, for which requests, and how deep
* `device`: the drafts of the device, and how many each request gets
* `step`: what a step did, and its line in a trace
* `learning`: what is learned from a step; `scoring`: which of its drafts were right
* `slowdown`: no drafts while they are measured to be slower than plain decoding
"""

from outrider.control.adaptive import AdaptiveDrafter, adaptive_control, adaptive_drafter
from outrider.control.control import Control
from outrider.control.decision import Limits

__all__ = ["AdaptiveDrafter", "Control", "Limits", "adaptive_control", "adaptive_drafter"]
