"""Drafters: what proposes tokens. None knows the engine it drafts for."""

from outrider.drafters.ahead import AheadDrafter
from outrider.drafters.guard import GuardedDrafter
from outrider.drafters.model import DraftModel, ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.own import OwnRequests
from outrider.drafters.registry import OURS, make_drafter
from outrider.drafters.suffix import SuffixDrafter

__all__ = [
    "OURS",
    "AheadDrafter",
    "DraftModel",
    "GuardedDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "NoDrafter",
    "OwnRequests",
    "SuffixDrafter",
    "make_drafter",
]
