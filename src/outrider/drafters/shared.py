"""What finished requests have written, for later ones of the same tenant to copy from.

Nothing of it passes from one tenant to another: each has indices of its own, whose hashes are
salted with its name. Texts lie in chunks, several to an index; the oldest chunk goes when there are
too many tokens, whoever it belongs to. A token takes what it takes in an index: 13 bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from outrider.core import Request

if TYPE_CHECKING:
    from outrider.drafters.suffix import SuffixIndex

SEPARATOR = -1
"""Ends each text of a chunk. No token, so that nobody's text goes on with the next."""

PARTS = 4
"""A chunk is full when it holds this part of all; a longer text is cut."""

LEAST = 256
"""Tokens for which every chunk is counted, if it has fewer: many small tenants are bounded too."""


def tenant_of(request: Request) -> str:
    """Return whose request it is: the host's word, or that of everybody."""
    return str(getattr(request, "tenant", ""))


class SharedTexts:
    """Texts by tenant, of at most so many tokens in all.

    new_index: makes an index with this salt
    """

    def __init__(self, max_tokens: int, new_index: Callable[[int], SuffixIndex]) -> None:
        if max_tokens and max_tokens < PARTS * LEAST:
            raise ValueError(f"need shared_tokens of 0 or at least {PARTS * LEAST}")
        self._max_tokens, self._new_index = max_tokens, new_index
        self._chunks: dict[str, deque[SuffixIndex]] = {}  # a tenant's, the latest first
        self._ages: deque[str] = deque()  # the tenant of each chunk, the oldest first
        self._tokens = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of all texts."""
        return sum(chunk.nbytes for chunks in self._chunks.values() for chunk in chunks)

    def of(self, tenant: str) -> Sequence[SuffixIndex]:
        """Return what this tenant's requests may look at, the latest first."""
        return self._chunks.get(tenant, ())

    def add(self, tenant: str, text: Sequence[int]) -> None:
        """Keep a text, and drop the oldest if that is too much."""
        size = self._max_tokens // PARTS
        if not size or not text:
            return
        chunks = self._chunks.setdefault(tenant, deque())
        if not chunks or len(chunks[0]) + len(text) > size:
            digest = blake2b(tenant.encode(), digest_size=8).digest()
            chunks.appendleft(self._new_index(int.from_bytes(digest, "little")))
            self._ages.append(tenant)
            self._tokens += _counted(chunks[0])
        self._tokens -= _counted(chunks[0])
        chunks[0].extend([*text[: size - 1], SEPARATOR])
        self._tokens += _counted(chunks[0])
        while self._tokens > self._max_tokens:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        tenant = self._ages.popleft()
        chunks = self._chunks[tenant]
        self._tokens -= _counted(chunks.pop())
        if not chunks:
            del self._chunks[tenant]


def _counted(chunk: SuffixIndex) -> int:
    return max(LEAST, len(chunk))
