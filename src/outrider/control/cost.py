"""The time of a step, learned from the steps of this machine.

The time of a pass has two parts:

* the rows, by row bucket: see `curve`;
* reading the cache: a slope per cached token. It is learned from steps of the same row bucket that
  read different numbers of tokens.

A step with drafts of the CPU is launched when the outcome of the step before it is known, and *CPU*
time passes between the two. An engine that launches plain steps *early* does not wait in them. The
time of such steps is learned separately: that is the plain decoding that drafts have to beat.

Some attention backends read a request's cache once for all of its rows; others read it once per
row. An engine of the second kind may also have a *padded* pass, which reads the cache once but has
the same number of rows for every request. A step with drafts then takes the time of the cheaper
pass.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.control.curve import CLIP, ROW_BUCKETS, Curve
from outrider.control.decision import Limits
from outrider.control.estimate import RATE, Estimate

FEW_TOKENS = 2.0**30
"""Weight of a slope of zero, in tokens squared: one difference of 32,768 tokens. If contexts differ
by less in total, the slope stays near zero. A machine that is slow for some seconds must not be
mistaken for a long context."""

SHORT = 2.0**15
"""Total context, in tokens, that adds little to a step's time, even if it is read many times."""


class Slope:
    """Seconds per cached token, from steps of the same kind.

    value: the slope, in seconds per token
    """

    def __init__(self) -> None:
        self._means: dict[Hashable, tuple[float, Estimate]] = {}  # by kind: context and seconds
        self._product = self._square = 0.0
        self.value = 0.0

    def observe(self, kind: Hashable, context: int, seconds: float) -> None:
        """Learn from a step that read so many cached tokens.

        kind: steps of the same kind differ only in what they read
        """
        mean, usual = self._means.get(kind, (float(context), Estimate(seconds)))
        # a much longer context may take much longer: that is no outlier
        times = (context + SHORT) / (mean + SHORT)
        times = max(times, 1 / times)
        more, longer = context - mean, usual.observe(seconds, CLIP * times * usual.value)
        self._means[kind] = mean + RATE * more, usual
        if usual.is_wrong:  # the times changed for another reason: start this kind again
            del self._means[kind]
            return
        self._product = 0.99 * self._product + more * longer
        self._square = 0.99 * self._square + more * more
        self.value = max(0.0, self._product / (self._square + FEW_TOKENS))


class DraftCost:
    """The time of a draft model's passes.

    passes: a pass by the tokens that it reads
    """

    def __init__(self, row_buckets: Sequence[int] = ROW_BUCKETS) -> None:
        self.passes = Curve(row_buckets)

    def observe(self, passes: int, requests: int, unread: int, seconds: float) -> None:
        """Learn from passes, one after the other. The first one read the unread tokens."""
        first, more = self.passes.seconds(unread), self.passes.seconds(requests)
        expected = first + (passes - 1) * more
        share = seconds / expected if expected else 0.0
        self.passes.observe(unread, first * share or seconds / passes)
        if passes > 1:
            self.passes.observe(requests, more * share or seconds / passes)

    def seconds(self, passes: int, requests: int, unread: int) -> float:
        """Return the expected time of so many passes, one after the other.

        requests: number of requests that the model drafts for
        unread: tokens of these requests that it has not consumed yet, the last ones included
        """
        return self.passes.seconds(unread) + (passes - 1) * self.passes.seconds(requests)


class StepCost:
    """The time of a step without drafting.

    verify: a pass of the target by rows, from its decision to its outcome, without the time to read
        the cache
    cpu: from an outcome to the next decision, by requests, without draft passes
    early: a step without drafts of the CPU that was launched early, from outcome to outcome,
        likewise
    slope: seconds per cached token that a pass reads
    padded: a padded pass by all of its rows, without the time to read the cache
    row_buckets: of `verify`
    limits: what the engine can do
    """

    def __init__(
        self, row_buckets: Sequence[int] = ROW_BUCKETS, limits: Limits | None = None
    ) -> None:
        self.verify, self.slope, self.row_buckets = Curve(row_buckets), Slope(), row_buckets
        self.cpu, self.padded = Curve(), Curve()
        # nothing is to be tried here: all rows up to those of the drafts are paid for at once
        self.early = Curve(row_buckets, optimism=0.0)
        self.limits = limits or Limits()

    def observe(
        self,
        rows: int,
        context: int,
        seconds: float,
        requests: int | None = None,
        padded_width: int = 0,
        early: bool = False,
    ) -> None:
        """Learn from one pass of the target, or from a step that was launched early.

        context: tokens of all requests together
        requests: number of requests; None for a plain step, which has one row per request
        padded_width: rows of each request in a padded pass; 0 if it was not padded
        early: whether the step was launched early
        """
        requests = rows if requests is None else requests
        curve, read = self.early if early else self.verify, self._read(rows, context, requests)
        if padded_width:
            curve, rows, read = self.padded, requests * padded_width, context
        else:
            self.slope.observe((early, curve.row_bucket(rows)), read, seconds)
        curve.observe(rows, max(0.1 * seconds, seconds - self.slope.value * read))

    def refresh(self) -> None:
        """Work out now what the next decision asks for."""
        for curve in (self.verify, self.cpu, self.early):
            curve.refresh()

    def table(
        self, rows: int, context: int, requests: int, padded_width: int = 0
    ) -> NDArray[np.float64]:
        """Return the expected time of a step of 0, 1, ... up to so many rows, without drafting.

        The entry of `requests` rows is a plain step, which may be launched early.

        context: tokens of all requests together
        requests: number of requests, at least 1. A backend that reads the cache once per row reads
            `context` once up to this many rows, and in proportion to the rows beyond.
        padded_width: rows of each request in a padded pass; 0 if it may not be used
        """
        if self.limits.reads_each_row:
            reads = np.maximum(np.arange(rows + 1) / requests, 1.0)
            seconds = self.verify.table(rows) + self.slope.value * context * reads
            if padded_width:
                most = self._padded(context, requests, padded_width)
                seconds[requests + 1 :] = seconds[requests + 1 :].clip(max=most)
        else:
            seconds = self.verify.table(rows) + self.slope.value * context
        seconds += self.cpu.seconds(requests)
        seconds[requests] = self.plain(context, requests)
        return seconds

    def early_table(self, rows: int, context: int, requests: int) -> NDArray[np.float64]:
        """Return the same of steps that are launched early, drafts or not."""
        if self.early.is_known:
            return self.early.table(rows) + self.slope.value * context
        seconds = self.table(rows, context, requests)
        plain = float(seconds[requests])
        seconds[requests + 1 :] -= self.waiting(context, requests)
        return np.maximum(seconds, plain)

    def plain(self, context: int, requests: int) -> float:
        """Return the expected time of a plain step, launched early if the engine does that."""
        if self.early.is_known:
            seconds = self.early.seconds(requests)
        else:
            seconds = self.verify.seconds(requests)
            if not self.limits.launches_early:
                seconds += self.cpu.seconds(requests)
        return seconds + self.slope.value * context

    def waiting(self, context: int, requests: int) -> float:
        """Return how much longer a plain step takes if it is not launched early."""
        seconds = self.verify.seconds(requests) + self.cpu.seconds(requests)
        return max(0.0, seconds + self.slope.value * context - self.plain(context, requests))

    def prefers_padded(self, rows: int, context: int, requests: int, padded_width: int) -> bool:
        """Say whether a padded pass would be faster than the usual pass of so many rows."""
        if not padded_width or rows == requests:
            return False
        usual = self.verify.seconds(rows) + self.slope.value * self._read(rows, context, requests)
        return self._padded(context, requests, padded_width) < usual

    def _read(self, rows: int, context: int, requests: int) -> int:
        """Return how many cached tokens a pass reads if drafts are spread evenly."""
        each_row = self.limits.reads_each_row
        return context * max(rows, requests) // requests if each_row else context

    def _padded(self, context: int, requests: int, width: int) -> float:
        """Return the expected time of a padded pass. Until one was seen, padding counts as free."""
        rows = requests * width
        known = self.padded.has_seen(rows)
        seconds = self.padded.seconds(rows) if known else self.verify.seconds(requests)
        return seconds + self.slope.value * context
