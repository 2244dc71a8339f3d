"""How many drafts of the device each request gets, and which drafter makes them.

The engine may be able to look drafts up on the device, or to let a head draft there. Such a step is
launched before the outcome of the step before it is known, so it costs no wait. But the numbers of
drafts are chosen before the CPU can know whether the drafts are good. Survival is therefore
estimated from what is known of each request: how many drafts were accepted in the last step that
was reported, and how easy its text has been. Drafts that were made and not verified count too: the
first of them is compared with what was emitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.control.acceptance import Acceptance, Chances
from outrider.control.cost import StepCost
from outrider.control.curve import Curve
from outrider.control.decision import DeviceDrafts, Feasible, Report
from outrider.control.model_choice import DEPTHS as PASSES
from outrider.control.model_choice import ModelChoice
from outrider.control.plan import Offer
from outrider.control.policy import Spread, spread
from outrider.control.scoring import levels
from outrider.control.step import Step
from outrider.core import Bools, Floats, Ints, Outcomes, Request

NAME = "device"
"""The lookup."""

MAX_DRAFTS = 24
"""The most drafts of a request."""

MADE = 4
"""Drafts that are made for each request, if none is verified."""

NO_DRAFTS, FEW, MANY, ALL, NEW = range(5)
"""What the last reported step says of a request: none of its drafts was accepted, up to
FEW_ACCEPTED, more, all of more; and nothing yet."""

FEW_ACCEPTED = 3

DEPTH_BUCKETS = np.array([0, 1, 2, 2, *[3] * 4, *[4] * 16])
"""Drafts at depth 1, 2, 3-4, 5-8 and beyond are alike."""

PRIORS = np.array(
    [
        [0.12, 0.55, 0.60, 0.80, 0.90],
        [0.28, 0.55, 0.60, 0.70, 0.85],
        [0.25, 0.55, 0.60, 0.90, 0.95],
        [0.60, 0.90, 0.95, 0.97, 0.98],
        [0.20, 0.60, 0.70, 0.85, 0.90],
    ]
)
"""Chances by state and depth before anything was seen, as lookups in recorded answers had them
(tests/control/traces.json.gz)."""

MARGIN = 0.01
"""Share by which a step with drafts must promise more than one without, and one drafter more than
another."""

PLAIN_CHECK_EVERY, LARGE_GAIN = 64, 1.5
"""A plain step is made after PLAIN_CHECK_EVERY steps without one, unless drafts gain LARGE_GAIN:
the time of plain steps must be recent."""

MIN_PASS_SHARE = 0.01
"""The least share of a step that a head's passes take, whatever was measured."""

NOISE_TOKENS = 3.0
"""Tokens that a request may lack by chance, of those that plain decoding would have emitted."""

RATE, WINDOW = 0.05, 32.0
"""Weight of a step in moving averages, and half-life of a request's balance in steps."""


@dataclass(eq=False)
class Arm:
    """One way to draft on the device.

    name: NAME, or that of a head
    chances: of its drafts, by state and depth
    state: by row of a request, what the last reported step says
    head: what is known of it in steps that wait for its drafts; None for the lookup
    passes: the time of a pass of the head in such a step, by requests
    reached: goodput of steps that wait for the head's drafts, on average
    """

    name: str
    chances: Chances
    head: ModelChoice | None = None
    passes: Curve = field(default_factory=Curve)
    reached: float = 0.0
    state: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def survival(self, rows: Ints, most: Ints) -> Floats:
        """Return the chance that each request's drafts are accepted up to each depth, [B, K].

        rows: [B] of the requests: see `Acceptance`
        most: [B] the most drafts of each
        """
        deepest = min(int(most.max(initial=0)), MAX_DRAFTS)
        buckets = PRIORS.shape[1] * self._state_of(rows)[:, None] + DEPTH_BUCKETS[:deepest]
        found: Floats = self.chances.of_buckets(rows[:, None], buckets).cumprod(1)
        if (most < deepest).any():
            found[np.arange(deepest) >= most[:, None]] = 0.0
        return found

    def is_new(self, rows: Ints) -> Bools:
        """Return of which requests no step was reported, [B]."""
        found: Bools = self._state_of(rows) == NEW
        return found

    def seconds(self, depth: int, batch: int) -> float:
        """Return how long it takes to draft so deep. A lookup takes no time."""
        if self.head is None or not depth:
            return 0.0
        if self.passes.has_seen(batch):
            return depth * self.passes.seconds(batch)
        return self.head.cost.seconds(depth, batch, 2 * batch)

    def learn(self, rows: Ints, report: Report) -> None:
        """Learn from a step in which it drafted, of all drafts whose parents were right."""
        outcomes, made = report.outcomes, report.made
        assert made is not None
        accepted, verified = outcomes.num_accepted_drafts, outcomes.num_drafts
        goes_on = np.array([reason is None for reason in outcomes.finish_reasons])
        right, tested = accepted.copy(), np.minimum(accepted + 1, verified)
        # all verified drafts were right: the next one is compared with the token that followed
        more = np.flatnonzero(goes_on & (accepted == verified) & (verified < made.shape[1]))
        last = outcomes.tokens[outcomes.starts[more] + accepted[more]]
        right[more] += made[more, accepted[more]] == last
        tested[more] += 1
        self._learn(rows, right, np.where(goes_on, tested, 0))

    def learn_offer(self, rows: Ints, offer: Offer, outcomes: Outcomes) -> None:
        """Learn from drafts of the CPU, which are much like those that are made here."""
        drafts = offer.drafts
        right, tested = np.zeros_like(rows), np.zeros_like(rows)
        for depth, (nodes, hits) in enumerate(levels(offer, outcomes)):
            owners = drafts.owners[nodes]
            first = (drafts.ranks[nodes] == 0) & (right[owners] == depth)
            tested[owners[first]] += 1
            right[owners[first]] += hits[first]
        asked = np.flatnonzero(tested)
        self._learn(rows[asked], right[asked], tested[asked])

    def _learn(self, rows: Ints, right: Ints, tested: Ints) -> None:
        """Learn how many drafts of each request were right, [B], of how many that were tested."""
        owners = np.repeat(np.arange(len(rows)), tested)
        depths = np.arange(len(owners)) - (tested.cumsum() - tested)[owners]
        deep = DEPTH_BUCKETS[np.minimum(depths, MAX_DRAFTS - 1)]
        buckets = PRIORS.shape[1] * self._state_of(rows)[owners] + deep
        self.chances.observe_buckets(rows[owners], buckets, depths < right[owners])
        state = np.where(right > FEW_ACCEPTED, np.where(right >= tested, ALL, MANY), FEW)
        state = np.where(right == 0, NO_DRAFTS, state)
        self.state[rows] = np.where(tested > 0, state, self._state_of(rows))

    def learn_reached(self, goodput: float) -> None:
        """Learn from a step that waited for the head's drafts."""
        self.reached += RATE * (goodput - self.reached) if self.reached else goodput

    def _state_of(self, rows: Ints) -> Ints:
        if (missing := int(rows.max(initial=-1)) + 1 - len(self.state)) > 0:
            self.state = np.append(self.state, np.full(missing + len(self.state), NEW))
        return self.state[rows]


class DeviceChoice:
    """Decides how the device drafts.

    slowdown: share by which a step may take longer than a plain one for any request that gains
        nothing; None for as much as the whole batch gains from
    goodput: tokens per second that the last decision promised
    """

    def __init__(
        self,
        acceptance: Acceptance,
        cost: StepCost,
        slowdown: float | None,
        is_allowed: bool = True,
    ) -> None:
        self._acceptance, self._cost, self._slowdown = acceptance, cost, slowdown
        self._is_allowed = is_allowed
        self.arms: dict[str, Arm] = {}
        self._add(NAME, None)
        self.goodput = 0.0
        self.active = ""  # the drafter that drafts there; "" if none does
        self._since_plain: Counter[int] = Counter()  # decisions since a plain step, by row bucket
        self._balance = np.zeros(0)  # by row: tokens beyond those of plain decoding, lately
        self._rows_of: tuple[Sequence[Request], Ints] | None = None

    def add(self, head: ModelChoice) -> None:
        """Let a head draft on the device too."""
        self._add(head.name, head)

    def _add(self, name: str, head: ModelChoice | None) -> None:
        self.arms[name] = Arm(name, self._acceptance.add_buckets(PRIORS.ravel()), head)

    def can_draft(self, feasible: Feasible) -> bool:
        """Say whether the device may draft in a step."""
        return self._is_allowed and NAME in feasible.on_device

    def forget(self, row: int | None) -> None:
        """Forget the request of a row; nothing for None."""
        self._rows_of = None
        if row is None:
            return
        for arm in self.arms.values():
            if row < len(arm.state):
                arm.state[row] = NEW
        if row < len(self._balance):
            self._balance[row] = 0.0

    def decide(
        self, requests: Sequence[Request], most: Ints, feasible: Feasible, plain: bool = False
    ) -> DeviceDrafts:
        """Return what the device drafts in the next step.

        most: [B] the most drafts of each request
        plain: whether none may be verified
        """
        batch, rows = len(requests), self._rows(requests)
        name, chosen = NAME, Spread(np.zeros(batch, np.int64), 0.0)
        bucket = self._cost.verify.row_bucket(batch)
        is_timed = self._cost.early.is_known or self._cost.verify.is_known
        if not plain and is_timed and feasible.max_rows > batch and most.any():
            context = sum([request.length for request in requests])
            name, chosen = self._best(rows, most, feasible, context)
            self._since_plain[bucket] += 1
            table = self._cost.plain(context, batch)
            is_small = chosen.goodput * table < LARGE_GAIN * batch
            if is_small and self._since_plain[bucket] > PLAIN_CHECK_EVERY:
                chosen = Spread(np.zeros(batch, np.int64), batch / table)
        if not chosen.num_drafts.any():
            self._since_plain[bucket] = 0
        self.goodput = chosen.goodput
        self.active = name if chosen.num_drafts.any() else ""
        deepest = int(chosen.num_drafts.max(initial=0))
        width = deepest if name != NAME and deepest else max(MADE, deepest)
        return DeviceDrafts(name if deepest else NAME, chosen.num_drafts, width)

    def learn(self, report: Report, drafter: str) -> None:
        """Learn from a step in which the device made drafts."""
        arm = self.arms.get(drafter)
        if arm is not None and report.made is not None and len(report.outcomes.requests):
            arm.learn(self._rows(report.outcomes.requests), report)

    def learn_time(self, step: Step, rows: Ints, tokens: Ints, depth: int) -> None:
        """Learn how long a step took that was launched early, and what it brought each request.

        rows, tokens: [B] of the requests, and how many tokens each emitted
        depth: the most drafts of a request
        """
        plain = self._cost.plain(step.context, step.requests)
        if plain:
            self._grow(rows)
            kept = 0.5 ** (1 / WINDOW) * self._balance[rows]
            self._balance[rows] = kept + tokens - step.seconds / plain
        arm = self.arms.get(step.on_device)
        if arm is not None and arm.head is not None:
            expected = float(self._cost.early_table(step.rows, step.context, step.requests)[-1])
            more = max(step.seconds - expected, MIN_PASS_SHARE * step.seconds)
            arm.passes.observe(step.requests, more / max(1, depth))

    def _rows(self, requests: Sequence[Request]) -> Ints:
        """Return the requests' rows. Mostly the requests are those of the step before."""
        if self._rows_of is None or self._rows_of[0] is not requests:
            self._rows_of = requests, self._acceptance.rows([request.id for request in requests])
        return self._rows_of[1]

    def _grow(self, rows: Ints) -> None:
        if (missing := int(rows.max(initial=-1)) + 1 - len(self._balance)) > 0:
            self._balance = np.append(self._balance, np.zeros(missing + len(self._balance)))

    def _best(self, rows: Ints, most: Ints, feasible: Feasible, context: int) -> tuple[str, Spread]:
        """Return the drafter that promises most, and its numbers of drafts."""
        batch = len(rows)
        self._grow(rows)
        spare = np.minimum(self._balance[rows] + NOISE_TOKENS, 0.0) / WINDOW
        # the first step of a request is no window
        spare[self.arms[NAME].is_new(rows)] = 1.0
        name, best = NAME, Spread(np.zeros(batch, np.int64), 0.0)
        for arm in self.arms.values():
            if arm.name not in feasible.on_device:
                continue
            survival = arm.survival(rows, most)
            deepest = survival.shape[1]
            most_rows = min(batch + survival.size, feasible.max_rows)
            table = self._cost.early_table(most_rows, context, batch)
            for depth in PASSES[deepest >= PASSES].tolist() if arm.head else [deepest]:
                seconds = table + arm.seconds(depth, batch)
                seconds[batch] = table[batch]  # without drafts there are no passes
                found = spread(survival[:, :depth], seconds, spare, self._slowdown, MARGIN)
                least = best.goodput * (1 + MARGIN if arm.name != self.active else 1.0)
                if arm.head is not None and arm.name != self.active:
                    least = max(least, arm.reached)
                if found.goodput > least:
                    name, best = arm.name, found
        return name, best
