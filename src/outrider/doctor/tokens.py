"""Whether draft and target speak of the same tokens: token by token, and by what they encode."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from outrider.checkpoint import check_files
from outrider.clients import render_chat
from outrider.doctor.finding import Finding
from outrider.doctor.model import Model
from outrider.errors import Unsupported

__all__ = ["PROBES", "check_tokens", "has_tokenizer"]

PROBES = {
    "code": "def f(xs: list[int]) -> int:\n\treturn sum(x ** 2 for x in xs if x != 0x1F)  # ok\n",
    "accents": "Žluťoučký kůň, naïve café, Ærøskøbing, größer, Ελλάδα, Москва",
    "a combining accent": "cafe\u0301 nai\u0308ve",
    "other scripts": "速度と正確さ、 속도, السرعة, गति",
    "emoji": "🐎👩🏽‍🚀 ✨ 🇨🇿",
    "whitespace": "  two\n\n\n   three\t\ttabs \r\n and an end   ",
    "numbers": "3.14159, 1,000,000, 2024-02-29, 0007, 1e-9",
    "special tokens as text": "<|im_start|>user\n<s>[INST] hi </s><|endoftext|>",
}
"""Texts on which tokenizers of one vocabulary have been seen to differ, or might."""

_TALK = [
    {"role": "user", "content": "Is the road clear?"},
    {"role": "assistant", "content": "It is."},
    {"role": "user", "content": "Go on."},
]

FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
INSTALL = "pip install 'outrider[transformers]'"


def check_tokens(target: Model, draft: Model) -> Iterator[Finding]:
    """Compare the tokenizers beside two models' weights."""
    try:
        from outrider.engines.tokenizers import check_same_tokens  # it may need torch

        mine, theirs = (_load(model) for model in (target, draft))
    except Exception as error:  # libraries raise classes of their own
        install = isinstance(error, ImportError)
        yield Finding(
            "tokenizer",
            "warning",
            f"the tokenizers were not compared: {str(error).splitlines()[0]:.160}",
            "with another tokenizer hosts refuse the draft",
            INSTALL if install else "put tokenizer.json beside the weights of both models",
        )
        return
    same = yield from _vocabulary(mine, theirs, draft, check_same_tokens)
    if same:
        yield from _encoding(mine, theirs)
        yield from _special(mine, theirs)
        yield from _chat(mine, theirs)


def has_tokenizer(model: Model) -> bool:
    """Say whether there are files of a tokenizer beside a model's weights."""
    return any(file for name in FILES for file in model.path.glob(name))


def _load(model: Model) -> Any:
    """Return a model's tokenizer as hosts load it, or as the library below them does."""
    if not has_tokenizer(model):
        # Transformers would make one of nothing
        raise OSError(f"{model.name} has no tokenizer files")
    if importlib.util.find_spec("transformers") is not None:
        from outrider.engines.transformers.loading import load_tokenizer

        return load_tokenizer(model.path)
    if importlib.util.find_spec("tokenizers") is None:
        raise ImportError("neither Transformers nor tokenizers is installed here")
    from tokenizers import Tokenizer

    check_files(model.path)
    file = model.path / "tokenizer.json"
    if not file.is_file():
        raise OSError(f"{model.name} has no tokenizer.json, and Transformers is not installed here")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"tokenizer.json of {model.name}: {error}") from error


def _vocabulary(
    mine: Any, theirs: Any, draft: Model, check: Callable[[Any, Any], None]
) -> Generator[Finding, None, bool]:
    """Compare token by token, and return whether they are the same. check: the hosts' own"""
    try:
        check(mine, theirs)
    except Unsupported as error:
        yield Finding(
            "tokenizer",
            "problem",
            error.what,
            "a draft's ids would mean other words to the target: hosts refuse the draft",
            error.fix,
        )
        return False
    ids, others = set(mine.get_vocab().values()), set(theirs.get_vocab().values())
    yield Finding("tokenizer", "ok", f"each of {len(others):,} ids is the same token in both")
    if missing := len(ids - others):
        yield Finding(
            "tokenizer",
            "warning" if missing > len(ids) / 10 else "note",
            f"the draft lacks {missing:,} of the target's {len(ids):,} tokens",
            "it never drafts them",
        )
    rows = draft.vocabulary
    if rows is not None and max(ids) >= rows:
        yield Finding(
            "tokenizer",
            "note",
            f"the draft model reads ids below {rows:,}, the target's tokens go up to {max(ids):,}",
            "while a request's new tokens are beyond that, it goes without drafts",
        )
    return True


def _encoding(mine: Any, theirs: Any) -> Iterator[Finding]:
    differ = [name for name, text in PROBES.items() if _ids(mine, text) != _ids(theirs, text)]
    if differ:
        yield Finding(
            "tokenizer",
            "warning",
            f"the tokenizers cut text differently: {', '.join(differ)}",
            "the draft reads the target's cuts, which it was not trained on: fewer drafts are "
            "accepted; answers stay the same",
            "use a draft model of the same family",
        )
    else:
        yield Finding(
            "tokenizer",
            "ok",
            f"{len(PROBES)} probes encode to the same ids: code, "
            "accents, scripts, emoji, whitespace",
        )


def _ids(tokenizer: Any, text: str) -> list[int]:
    found = tokenizer.encode(text, add_special_tokens=False)
    return list(getattr(found, "ids", found))


def _special(mine: Any, theirs: Any) -> Iterator[Finding]:
    a, b = _special_tokens(mine), _special_tokens(theirs)
    differ = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    if differ:
        said = ", ".join(f"{name}: {a.get(name)} and {b.get(name)}" for name in differ[:4])
        yield Finding(
            "tokenizer",
            "note",
            f"special tokens differ: {said}",
            "the target's hold; the draft may misjudge where a text begins and ends",
        )
    else:
        yield Finding(
            "tokenizer", "ok", f"the same special tokens: {', '.join(sorted(a)) or 'none'}"
        )


def _special_tokens(tokenizer: Any) -> Mapping[str, str]:
    found = getattr(tokenizer, "special_tokens_map", None)
    if found is None:  # the `tokenizers` library knows which, not what for
        added = tokenizer.get_added_tokens_decoder()
        return {str(i): token.content for i, token in added.items() if token.special}
    return {name: str(value) for name, value in found.items()}


def _chat(mine: Any, theirs: Any) -> Iterator[Finding]:
    a, b = (getattr(one, "chat_template", None) for one in (mine, theirs))
    if a is None and b is None:
        return
    if a is None or b is None:
        which = "target" if a is None else "draft"
        yield Finding(
            "tokenizer",
            "note",
            f"the {which} has no chat template, the other has one",
            "it was perhaps not trained for chat: fewer drafts may be accepted there",
            "pair models that were both tuned for chat, or neither",
        )
        return
    try:
        same = a == b or _talk(mine) == _talk(theirs)
    except Unsupported as error:
        what = f"the chat templates could not be compared: {error.what}"
        yield Finding("tokenizer", "note", what, fix=error.fix)
        return
    if same:
        yield Finding("tokenizer", "ok", "a talk becomes the same ids by both chat templates")
    else:
        yield Finding(
            "tokenizer",
            "note",
            "the chat templates differ",
            "the draft reads talks in a form that it was not tuned for: fewer drafts may be kept",
            "compare acceptance on your own prompts: outrider bench",
        )


def _talk(tokenizer: Any) -> list[int]:
    return _ids(tokenizer, render_chat(tokenizer, _TALK))
