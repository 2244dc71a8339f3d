"""Drafting ahead: a process of its own grows trees of what may come while the target verifies."""

from outrider.drafters.ahead.drafter import AheadDrafter
from outrider.drafters.ahead.growth import BranchingModel, Growth
from outrider.drafters.ahead.server import DraftServer

__all__ = ["AheadDrafter", "BranchingModel", "DraftServer", "Growth"]
