"""What the logits of a pass take, which bounds its rows.

A step over N = B (K + 1) rows has logits for each of them, and sampling makes copies. In bytes for
each row and token of the vocabulary:

    logits, as the model computes them            2 or 4
    logits in float32, for the sampler            4
    probabilities                                 4
    rows of one sampling kind beside the others   4
    each kind of penalty: its counts, and what
    they were before the drafts of a path         8

With a vocabulary of 151,936 that is 2.1 MB a row, and 5.8 MB with three kinds of penalties: 1,280
rows (256 requests, K = 4) would take 2.7 or 7.4 GB. MAX_LOGITS_BYTES bounds the rows of a step.
"""

from __future__ import annotations

MAX_LOGITS_BYTES = 2 << 30
"""Bytes that [N, V] tensors may take in one step."""


def row_bytes(vocab_size: int, logit_bytes: int = 2, penalties: int = 0) -> int:
    """Return what the logits of one row take while they are sampled from.

    penalties: kinds of them that the batch has: frequency, presence, repetition
    """
    return vocab_size * (logit_bytes + 12 + 8 * penalties)


def max_rows(vocab_size: int, logit_bytes: int = 2, penalties: int = 0) -> int:
    """Return how many rows a step may have, so that their logits stay within MAX_LOGITS_BYTES."""
    return max(1, MAX_LOGITS_BYTES // row_bytes(vocab_size, logit_bytes, penalties))
