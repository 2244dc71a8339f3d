"""The theory. Pure PyTorch: no kernels, no engine. Read `proposal`, `rules`, `settle`, `loop`."""

from outrider.core.ahead import AheadTree
from outrider.core.coins import Coins, KeyedCoins, Stream, gumbel_noise, murmur_hash32
from outrider.core.loop import Budget, Drafter, Host, Step, step
from outrider.core.proposal import (
    ROOT,
    Bools,
    ChainDistribution,
    Draft,
    DraftDistribution,
    Floats,
    Ints,
    PointMass,
    Proposal,
    Sampled,
    Siblings,
    chain,
    likeliest,
    survival,
)
from outrider.core.request import FinishReason, Request
from outrider.core.rules import (
    RuleName,
    Verdict,
    match,
    verify,
    verify_block,
    verify_match,
    verify_residual,
)
from outrider.core.sampling import Grammar, SamplingParams, is_whole
from outrider.core.settle import Outcome, Outcomes, settle
from outrider.core.stats import Stats, at_least
from outrider.core.target import (
    TRANSFORMS,
    Rows,
    TargetDistribution,
    target_distribution,
    transformed,
)
from outrider.errors import DraftFault, OutriderError, Unsupported

__all__ = [
    "ROOT",
    "TRANSFORMS",
    "AheadTree",
    "Bools",
    "Budget",
    "ChainDistribution",
    "Coins",
    "Draft",
    "DraftDistribution",
    "DraftFault",
    "Drafter",
    "FinishReason",
    "Floats",
    "Grammar",
    "Host",
    "Ints",
    "KeyedCoins",
    "Outcome",
    "Outcomes",
    "OutriderError",
    "PointMass",
    "Proposal",
    "Request",
    "Rows",
    "RuleName",
    "Sampled",
    "SamplingParams",
    "Siblings",
    "Stats",
    "Step",
    "Stream",
    "TargetDistribution",
    "Unsupported",
    "Verdict",
    "at_least",
    "chain",
    "gumbel_noise",
    "is_whole",
    "likeliest",
    "match",
    "murmur_hash32",
    "settle",
    "step",
    "survival",
    "target_distribution",
    "transformed",
    "verify",
    "verify_block",
    "verify_match",
    "verify_residual",
]
