"""The requests of soak_sglang.py, of every kind and form, and what of answers must be equal."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/engines/sglang"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/engines/sglang/site"))
import parity
import workload
from draft_process import TINY
from outrider_test_site import no_repeat_processor

MANNERS = {"ask": 90, "hang up": 4, "time out": 3, "malformed": 3}
"""How clients behave, with weights."""

BROKEN = ("raising", "hanging", "out_of_range", "floats", "wrong")

SETUPS: dict[str, dict[str, dict[str, Any]]] = {
    "heads": {
        "eagle3": {"path": str(TINY / "head"), "siblings": 2},
        "dflash": {"path": str(TINY / "dflash")},
    },
    "device": {"device": {}},
}
"""Drafters that a server has beside those that all have. The device does not draft beside heads."""


@dataclass(frozen=True)
class Piece:
    """How one server of a soak runs, until it has answered its share.

    setup: its drafters, of SETUPS
    exact: whether it is deterministic; else only greedy requests are asked, and logprobs may differ
        by rounding
    sanitize: whether it checks each KV slot that it reads
    """

    setup: str
    exact: bool
    sanitize: bool


PIECES = (
    Piece("heads", exact=True, sanitize=True),
    Piece("device", exact=False, sanitize=False),
    Piece("device", exact=True, sanitize=False),
    Piece("heads", exact=False, sanitize=True),
)
"""Servers follow one another in this order."""

LEVELS = {"heads": (1, 4, 16, 64, 256), "device": (1, 4, 16, 32)}
"""How many requests are asked at once. A round has four times as many of each. The device drafts
for 32 at most."""

CROWD = 96
"""Requests in a row that may have to share a drafter."""

ROUNDING = 1e-4
"""How far logprobs may differ where batches of other shapes are rounded otherwise."""

MAX_TOKENS = 10
"""Of an answer. Parity tests have longer ones; here many requests come and go."""

SAMPLED = {*workload.SEEDED, *workload.FILTERED, "json_schema, sampled"}
"""Kinds of requests that draw tokens: another batch has other coins unless it is deterministic."""

LOOKING_BACK = ("json_schema", "regex", "ebnf")

MALFORMED: tuple[dict[str, Any] | str, ...] = (
    "{",
    {"sampling_params": {}},
    {"text": 7},
    {"text": "a", "sampling_params": {"temperature": -1}},
    {"text": "a", "sampling_params": {"max_new_tokens": -5}},
    {"text": "a", "sampling_params": {"custom_params": {"outrider": 7}}},
    {"text": "a", "sampling_params": {"custom_params": {"outrider": {"max_drafts": -1}}}},
    {"text": "a", "sampling_params": {"custom_params": {"outrider": {"drafter": "nobody"}}}},
)


def distinct_requests(count: int, seed: int) -> list[workload.Wish]:
    """Return requests of every kind and form."""
    kinds = workload.greedy("stories260k") | workload.SEEDED | workload.FILTERED
    made = workload.make(kinds | workload.GRAMMAR, count, seed, MAX_TOKENS, no_repeat_processor())
    # a grammar and a processor together may forbid every token
    return [w for w in made if not (w.form == "processor" and w.kind in workload.GRAMMAR)]


def drafter_of(seed: int, number: int, setup: str) -> str:
    """Return the drafter of a request. One crowd in three has the same: one of the setup's own."""
    drafters = [*parity.DRAFTERS, *SETUPS[setup], "ahead", "none", *BROKEN]
    crowd = random.Random(f"{seed}/crowd/{number // CROWD}")
    if crowd.random() < 1 / 3:
        return crowd.choice([*SETUPS[setup], "adaptive"])
    return random.Random(f"{seed}/drafter/{number}").choice(drafters)


def is_simple(wish: workload.Wish) -> bool:
    """Say whether the device may draft for a request: what it looks at is the last token alone."""
    asked = str(wish.body)
    return wish.form not in ("logprobs", "processor") and not any(
        word in asked for word in ("penalty", "min_new_tokens", *LOOKING_BACK)
    )


def choices(wishes: Sequence[workload.Wish], drafter: str, piece: Piece) -> list[int]:
    """Return which requests may have this drafter: where the device may draft, it has to."""
    may_draft = piece.setup == "device" and drafter in ("device", "adaptive")
    return [
        i
        for i, wish in enumerate(wishes)
        if (is_simple(wish) or not may_draft) and (piece.exact or is_greedy(wish))
    ]


def is_greedy(wish: workload.Wish) -> bool:
    """Say whether the target's most likely tokens are the answer: nothing is drawn."""
    return wish.kind not in SAMPLED


def with_options(wish: workload.Wish, **options: Any) -> tuple[str, dict[str, Any]]:
    """Return a request with options of Outrider's."""
    body = copy.deepcopy(wish.body)
    params = body["sampling_params"] if wish.path == "/generate" else body
    params["custom_params"] = {**params.get("custom_params", {}), "outrider": options}
    return wish.path, body


def essentials(answer: Any) -> dict[str, Any]:
    """Return what of an answer has to be that of plain decoding."""
    logprobs = without_masked(workload.logprobs(answer))
    return {"essence": workload.essence(answer), "logprobs": logprobs}


def without_masked(found: Any) -> Any:
    """Leave out tokens that a grammar forbids: which of them are listed varies, all are equal."""
    if isinstance(found, dict):
        return {key: without_masked(value) for key, value in found.items() if not _masked(value)}
    if isinstance(found, list):
        return None if found and _masked(found[0]) else [without_masked(one) for one in found]
    return found


def _masked(value: Any) -> bool:
    return isinstance(value, float) and value < -1e38


def difference(wish: workload.Wish, answer: Any, plain: Any, exact: bool = True) -> Any:
    """Return how an answer differs from plain decoding's: in ids, text, end, counts or logprobs.

    exact: whether logprobs must be equal to the last bit
    """
    found = essentials(answer)
    if found["essence"] != plain["essence"]:
        return found["essence"], plain["essence"]
    try:
        gap = workload.furthest(found["logprobs"], plain["logprobs"])
    except AssertionError:
        gap = float("inf")
    # SGLang adds several penalties in another order in each process
    within = 1e-5 if "additive" in wish.kind else 0.0
    if not exact:
        within = ROUNDING
    return None if gap <= within else (gap, found["logprobs"], plain["logprobs"])


def num_tokens(answer: Any) -> int:
    """Return how many tokens an answer has."""
    if isinstance(answer, list):
        return sum(map(num_tokens, answer))
    if "choices" in answer:
        return int((answer["usage"] or {}).get("completion_tokens", 0))
    return int(answer["meta_info"]["completion_tokens"])
