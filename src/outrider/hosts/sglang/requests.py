"""A request of SGLang's as drafters see it, and those of a batch that have rows in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core import Ints, Request


@dataclass
class LiveRequest(Request):
    """A request of SGLang's as drafters see it.

    req: the host's own
    drafter: who drafts for it
    max_drafts: the most drafts in a step
    explain: whether it asks what each step did
    line, on_device: where its text is on the device, and how many tokens of it: see `on_device`
    unread: how many tokens a head that drafts on the device may have to read: see `head_steps`
    tenant: whose texts it may share: those with its `cache_salt` or `extra_key`, as in SGLang's own
        prefix cache
    """

    req: Any = None
    drafter: str = "none"
    max_drafts: int = 0
    explain: bool = False
    line: int = 0
    on_device: int = 0
    unread: int = 0
    tenant: str = ""


def tenant_of(req: Any) -> str:
    """Return whose texts a request of SGLang's may share; "" for all without a name.

    SGLang 0.5.23 keeps `cache_salt` apart from `extra_key`. The length of the first tells "a", "bc"
    from "ab", "c".
    """
    salt, key = getattr(req, "cache_salt", None) or "", req.extra_key or ""
    return f"{len(salt)}:{salt}{key}" if salt or key else ""


@dataclass(frozen=True, eq=False)
class ActiveRequests:
    """The requests of a batch that have rows in a step.

    requests: with all that they have emitted
    members: [R] their places in the batch
    lens: [R] how many of their tokens are cached
    kinds: [R] how they are sampled
    """

    requests: Sequence[LiveRequest]
    members: Ints
    lens: Ints
    kinds: Sequence[str]
