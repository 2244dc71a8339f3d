"""The tiny pair and three prompts."""

from __future__ import annotations

import pytest

TEXTS = ["The outrider", "At the bridge the toll-keeper", "The road was"]


@pytest.fixture(scope="module")
def pair(load, tokenizer):
    """Return the tiny target (Llama), its draft (GPT-2), their tokenizer and prompts."""
    tok = tokenizer("tiny-target")
    return load("tiny-target"), load("tiny-draft"), tok, [tok.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def target(pair):
    """Return the tiny target alone."""
    return pair[0]


@pytest.fixture(scope="module")
def prompts(pair):
    """Return the prompts alone."""
    return pair[3]
