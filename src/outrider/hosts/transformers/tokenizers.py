"""Whether two models speak of the same tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from outrider.core import Unsupported


def check_same_tokenizer(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any, draft_tokenizer: Any
) -> None:
    """Raise Unsupported unless both models have the same tokenizer.

    A tokenizer that is not given is the one beside its model's weights.
    """
    if tokenizer is None and draft_tokenizer is None:
        _check_by_name(target.config.name_or_path, draft.config.name_or_path)
    else:
        _check_same_tokens(
            tokenizer or _beside(target.config.name_or_path),
            draft_tokenizer or _beside(draft.config.name_or_path),
        )


@lru_cache(maxsize=16)
def _check_by_name(target: str, draft: str) -> None:
    """Load and compare once: that takes seconds for large vocabularies."""
    _check_same_tokens(_beside(target), _beside(draft))


def _beside(name: str) -> Any:
    """Load the tokenizer that lies beside a model's weights, or return None."""
    if not name:
        return None
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return None


def _check_same_tokens(target: Any, draft: Any) -> None:
    """Raise Unsupported unless each id that both tokenizers know is the same token in both.

    The sizes of embeddings do not matter: models pad them differently.
    """
    if target is None or draft is None:
        which = "target" if target is None else "draft"
        raise Unsupported(
            f"a draft model without the {which}'s tokenizer to compare",
            fix="pass tokenizer= and draft_tokenizer=",
        )
    a, b = (_by_id(tokenizer) for tokenizer in (target, draft))
    differing = sorted(i for i in a.keys() & b.keys() if a[i] != b[i])
    only_draft = sorted(b.keys() - a.keys())
    if differing or only_draft:
        i = (differing or only_draft)[0]
        raise Unsupported(
            f"the draft's tokenizer differs from the target's in {len(differing)} tokens and has "
            f"{len(only_draft)} more: id {i} is {a.get(i)!r} and {b.get(i)!r}",
            fix="use a draft model of the same family",
        )


def _by_id(tokenizer: Any) -> dict[int, str]:
    return {i: token for token, i in tokenizer.get_vocab().items()}
