"""The texts that are read and written on the paced device: recorded ones, put together.

A text of one kind has the prompts of its four traces one after the other, then their outputs in the
same order: about 500 tokens that a real model wrote, with what a real draft model said at each of
them. Token ids are renamed to a small vocabulary. Lookups depend only on which tokens are equal, so
acceptance is that of the real text.

A prompt begins with a header of four tokens which tells the device the text, how its ids are
shifted, and where its output begins. Each request of a batch has a shift of its own, so that nobody
can draft from another request's text.

Stories are a kind of their own: a smaller model wrote them, and a head of it said what follows, at
each depth.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path

import numpy as np

VOCABULARY = 1024
KINDS = ("code", "edit", "chat", "prose", "json")
STORIES, MIXED = "stories", "mixed"
HEADER = 4
UNKNOWN = 0.05
"""Confidence of the draft model where nothing was recorded: at the first token of an output."""

UNSAID = ([-1], [UNKNOWN])
"""What is likely there."""

FILE = Path(__file__).parents[3] / "control" / "traces.json.gz"
HEAD_FILE = Path(__file__).parent / "stories.json.gz"
ROTATIONS = 4


@dataclass(frozen=True)
class Text:
    """One text, in ids that are not shifted.

    prompt, output: token ids
    drafted, confidences: [len(output)] what the draft model said at each output token, and how sure
        it was
    likely: [len(output)] the tokens that it thought likely there, and their chances
    head: [len(output)] what a head thought likely there, as `likely`, at depth 1, 2, ...
    """

    kind: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    drafted: tuple[int, ...]
    confidences: tuple[float, ...]
    likely: tuple[tuple[list[int], list[float]], ...]
    head: tuple[list[tuple[list[int], list[float]]], ...]


@lru_cache(maxsize=1)
def texts() -> tuple[Text, ...]:
    """Return all texts: each kind's traces, beginning with another one each; stories last."""
    traces = json.loads(gzip.decompress(FILE.read_bytes()))["traces"]
    found = []
    for kind in KINDS:
        own = [trace for trace in traces if trace["kind"] == kind]
        found += [_joined(kind, own[i:] + own[:i]) for i in range(ROTATIONS)]
    stories = json.loads(gzip.decompress(HEAD_FILE.read_bytes()))["traces"]
    each = len(stories) // ROTATIONS
    found += [_joined(STORIES, stories[i * each :][:each]) for i in range(ROTATIONS)]
    return tuple(found)


def _joined(kind: str, traces: list[dict]) -> Text:
    names: dict[int, int] = {}

    def renamed(tokens: list[int]) -> list[int]:
        return [names.setdefault(int(token), len(names)) for token in tokens]

    prompt = [token for trace in traces for token in renamed(trace["prompt"])]
    output, drafted, confidences = [], [], []
    for trace in traces:
        output += renamed(trace["output"])
        # what follows output[i] is said of output[i + 1]
        first = [(ids[0], chances[0]) for ids, chances in trace["likely"]]
        if "drafts" in trace:
            first = [chain[0][:2] for chain in trace["drafts"]]
        drafted += [VOCABULARY - 1, *renamed([token for token, _ in first])]
        confidences += [UNKNOWN, *(confidence for _, confidence in first)]
    likely = [said for trace in traces for said in (UNSAID, *trace["likely"])]
    head = [said for trace in traces for said in ([], *trace.get("head", ()))]
    # a token that the text does not have may have any id that the text does not have
    others = range(VOCABULARY - max(len(ids) for ids, _ in likely), VOCABULARY)
    assert len(names) < others[0]

    def named(said: tuple[list[int], list[float]]) -> tuple[list[int], list[float]]:
        ids, chances = said
        pairs = zip(ids, others, strict=False)
        return [names.get(token, other) for token, other in pairs], chances

    heads = [[named(said) for said in depths] for depths in head]
    parts = prompt, output, drafted, confidences, map(named, likely), heads
    return Text(kind, *map(tuple, parts))


@dataclass(frozen=True)
class Prompt:
    """What a client sends, and the answer that it must get."""

    kind: str
    ids: list[int]
    output: list[int]


def prompts(kind: str, batch: int, context: int = 0, first: int = 0) -> list[Prompt]:
    """Return a batch of prompts, no two of them alike.

    kind: one of KINDS, STORIES, or MIXED: all of KINDS side by side
    context: prompts have at least so many tokens; earlier texts of the kind stand before it
    first: number of the first request: another one gives other prompts
    """
    found = []
    for number in range(first, first + batch):
        own = KINDS[number % len(KINDS)] if kind == MIXED else kind
        turn = number // len(KINDS) if kind == MIXED else number
        which = (*KINDS, STORIES).index(own) * ROTATIONS + turn % ROTATIONS
        found.append(_prompt(which, (number * 389 + 17) % VOCABULARY, context))
    return found


def _prompt(which: int, shift: int, context: int) -> Prompt:
    text = texts()[which]
    missing = max(0, context - HEADER - len(text.prompt))
    # each round of the filler has other ids: it looks like the text, and predicts none of it
    whole = np.array(text.prompt + text.output)
    rounds = [whole + 61 * (i + 1) for i in range(-(-missing // len(whole)))]
    filler = np.concatenate([*rounds, np.array([], dtype=np.int64)])[:missing]
    body = np.concatenate([filler, text.prompt]).astype(np.int64)
    start = HEADER + len(body)
    header = [which, shift, start // VOCABULARY, start % VOCABULARY]
    ids = header + ((body + shift) % VOCABULARY).tolist()
    output = [(token + shift) % VOCABULARY for token in text.output]
    return Prompt(text.kind, ids, output)


class Answers:
    """What both models say after each position, of many rows at once."""

    def __init__(self) -> None:
        longest = max(len(text.output) for text in texts())

        def table(values: list[tuple], dtype: type) -> np.ndarray:
            return np.array([list(islice(cycle(own), longest)) for own in values], dtype).ravel()

        self._length = longest
        self._output = table([text.output for text in texts()], np.int64)
        self._drafted = table([text.drafted for text in texts()], np.int64)
        self._confidences = table([text.confidences for text in texts()], np.float64)

    def target(self, headers: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the target's token after each position, [N].

        headers: [N, HEADER] of the rows' requests
        """
        places = self._places(headers, positions)
        return (self._output.take(places, mode="clip") + headers[:, 1]) % VOCABULARY

    def draft(self, headers: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the draft model's token after each position, and how sure it is of it, [N]."""
        places = self._places(headers, positions)
        tokens = (self._drafted.take(places, mode="clip") + headers[:, 1]) % VOCABULARY
        return tokens, self._confidences.take(places, mode="clip")

    def states(self, headers: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return where in its text each position is, [N, STATE]: see `heads`."""
        starts = headers[:, 2] * VOCABULARY + headers[:, 3]
        parts = headers[:, 0], headers[:, 1], positions + 1 - starts, np.zeros_like(positions)
        return np.stack(parts, -1)

    def _places(self, headers: np.ndarray, positions: np.ndarray) -> np.ndarray:
        starts = headers[:, 2] * VOCABULARY + headers[:, 3]
        # before the output, and far behind it, anything will do
        at = np.minimum(np.maximum(positions + 1 - starts, 0), self._length - 1)
        return headers[:, 0] * self._length + at
