"""Whether two models speak of the same tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from transformers import PreTrainedModel

from outrider.engines.tokenizers import check_same_tokens
from outrider.engines.transformers.loading import directory_of, load_tokenizer
from outrider.errors import Unsupported


def check_same_tokenizer(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any, draft_tokenizer: Any
) -> None:
    """Raise Unsupported unless both models have the same tokenizer.

    A tokenizer that is not given is the one beside its model's weights.
    """
    if tokenizer is None and draft_tokenizer is None:
        _check_by_name(target.config.name_or_path, draft.config.name_or_path)
    else:
        check_same_tokens(
            tokenizer or _beside(target.config.name_or_path),
            draft_tokenizer or _beside(draft.config.name_or_path),
        )


@lru_cache(maxsize=16)
def _check_by_name(target: str, draft: str) -> None:
    """Load and compare once: that takes seconds for large vocabularies."""
    check_same_tokens(_beside(target), _beside(draft))


def _beside(name: str) -> Any:
    """Load the tokenizer that lies beside a model's weights, or return None."""
    if not name:
        return None
    try:
        return load_tokenizer(directory_of(name, weights=False))
    except Unsupported:
        return None
