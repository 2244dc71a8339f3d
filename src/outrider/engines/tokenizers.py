"""Whether two tokenizers speak of the same tokens."""

from __future__ import annotations

from typing import Any

from outrider.errors import Unsupported


def check_same_tokens(target: Any, draft: Any) -> None:
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
