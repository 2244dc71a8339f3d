"""What Outrider's and vLLM's counters say, of a page of Prometheus' text format."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from outrider.clients.base import Counts
from outrider.errors import Unsupported

__all__ = ["counts_of", "parse_metrics"]

MOST = 1e18
"""Above this a counter is none."""

DEEPEST = 1024
"""The last position in a block of drafts that is read."""

LONGEST_LINE = 2**16
LONGEST_LABEL = 1000

Metrics = list[tuple[str, dict[str, str], float]]

# each is matched at one place, and no two of its parts can take the same character: linear
_NAME = re.compile(r"[A-Za-z_:][\w:]*", re.ASCII)
_LABEL = re.compile(r'([A-Za-z_]\w*)="([^"\\]*(?:\\.[^"\\]*)*)"(,|(?=\}))', re.ASCII)
_VALUE = re.compile(r" {1,4}(\S{1,40})(?: {1,4}-?\d{1,20})?\s{0,4}$", re.ASCII)

_READ = {
    f"outrider:{name}_total"
    for name in (
        *("verify_steps", "verify_rows", "emitted_tokens", "draft_tokens", "accepted_draft_tokens"),
        *("accepted_at", "proposed_at", "fallbacks", "step_seconds"),
    )
} | {
    f"vllm:spec_decode_num_{name}_total"
    for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
}
LONGEST_NAME = max(map(len, _READ))


def parse_metrics(text: str) -> Metrics:
    """Return the samples that are read here: name, labels, value. Others are skipped.

    Raises ValueError if one of them is malformed, negative, not finite or too large.
    """
    return list(_samples(text))


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    start = 0
    while start < len(text):
        # a page may have millions of lines: one at a time
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        name = _NAME.match(text, start, min(end, start + LONGEST_NAME + 1))
        if name is not None and name[0] in _READ:
            if end - start > LONGEST_LINE:
                raise ValueError(f"a line of {end - start:,} characters")
            line = text[start:end]
            labels, at = _labels(line, len(name[0]))
            yield name[0], labels, _value(line, at)
        start = end + 1


def _labels(line: str, at: int) -> tuple[dict[str, str], int]:
    """Return the labels that stand at a place of a line, and the place after them."""
    found: dict[str, str] = {}
    if not line.startswith("{", at):
        return found, at
    at += 1
    while not line.startswith("}", at):
        label = _LABEL.match(line, at)
        if label is None or len(label[2]) > LONGEST_LABEL or not label[2].isprintable():
            raise ValueError(f"labels of {line[:80]!r}")
        found[label[1]] = label[2]
        at = label.end()
    return found, at + 1


def _value(line: str, at: int) -> float:
    match = _VALUE.match(line, at)
    value = float(match[1]) if match else math.nan
    if not 0 <= value <= MOST:
        raise ValueError(f"value of {line[:80]!r}")
    return value


def counts_of(text: str, where: str) -> Counts | None:
    """Return what the counters of a page say, None if there are none. Raises Unsupported.

    where: the page's address, for messages
    """
    try:
        metrics = parse_metrics(text)
        return _outrider_counts(metrics) or _vllm_counts(metrics)
    except ValueError as error:
        raise Unsupported(
            f"{where} has counters that cannot be read ({error})", fix="look into the server's log"
        ) from error


class _Reader:
    """Sums samples by name, and by a label."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.names = {name for name, _, _ in metrics}

    def total(self, name: str) -> float:
        return sum(value for found, _, value in self.metrics if found == name)

    def by(self, name: str, label: str) -> dict[str, float]:
        sums: dict[str, float] = {}
        for found, labels, value in self.metrics:
            if found == name and label in labels:
                sums[labels[label]] = sums.get(labels[label], 0.0) + value
        return sums

    def at(self, name: str, first: int) -> dict[int, int]:
        """Return a counter by position, which counts from `first` there and from 1 here."""
        found: dict[int, int] = {}
        for said, value in self.by(name, "position").items():
            # others would be other keys of the same number
            if not re.fullmatch(r"0|[1-9]\d{0,3}", said, re.ASCII):
                raise ValueError(f"position {said!r:.40} of {name}")
            position = int(said) + 1 - first
            if not 1 <= position <= DEEPEST:
                raise ValueError(f"position {said!r:.40} of {name}")
            found[position] = int(value)
        return found


def _outrider_counts(metrics: Metrics) -> Counts | None:
    read = _Reader(metrics)
    if "outrider:verify_steps_total" not in read.names:
        return None
    counts = Counts(
        steps=read.total("outrider:verify_steps_total"),
        rows=read.total("outrider:verify_rows_total"),
        emitted=read.total("outrider:emitted_tokens_total"),
        drafted=read.total("outrider:draft_tokens_total"),
        accepted=read.total("outrider:accepted_draft_tokens_total"),
    )
    # rows are last tokens and drafts: one last token for each request in a step
    counts.request_steps = counts.rows - counts.drafted
    counts.accepted_at.update(read.at("outrider:accepted_at_total", first=1))
    counts.proposed_at.update(read.at("outrider:proposed_at_total", first=1))
    counts.by_drafter.update(_whole_numbers(read.by("outrider:draft_tokens_total", "drafter")))
    counts.fallbacks.update(_whole_numbers(read.by("outrider:fallbacks_total", "reason")))
    counts.seconds.update(read.by("outrider:step_seconds_total", "part"))
    return counts


def _whole_numbers(values: dict[str, float]) -> dict[str, int]:
    return {key: int(value) for key, value in values.items()}


def _vllm_counts(metrics: Metrics) -> Counts | None:
    """Return what vLLM says about its own speculation. Its steps are those with drafts."""
    read = _Reader(metrics)
    if "vllm:spec_decode_num_drafts_total" not in read.names:
        return None
    drafts = read.total("vllm:spec_decode_num_drafts_total")
    counts = Counts(
        request_steps=drafts,
        drafted=read.total("vllm:spec_decode_num_draft_tokens_total"),
        accepted=read.total("vllm:spec_decode_num_accepted_tokens_total"),
    )
    counts.emitted = counts.accepted + drafts
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    counts.accepted_at.update(read.at(name, first=0))
    return counts
