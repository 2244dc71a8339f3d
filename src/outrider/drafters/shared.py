"""What finished requests have written, for later ones of the same tenant to copy from.

Nothing of it passes from one tenant to another: each has texts of its own, whose hashes are
salted with its name. Outputs lie in chunks, several to a text; the oldest chunk goes when there are
too many tokens, whoever it belongs to. A token takes what it takes in a text: at most 16 bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from hashlib import blake2b

from outrider.core import Draft, PointMass, Request, chain
from outrider.drafters.lookup import SEPARATOR, Texts

PARTS = 4
"""A chunk is full when it holds this part of all; a longer output is cut."""

LEAST = 256
"""Tokens for which every chunk is counted, if it has fewer: many small tenants are bounded too."""


def tenant_of(request: Request) -> str:
    """Return whose request it is: the host's word, or that of everybody."""
    return str(getattr(request, "tenant", ""))


class SharedTexts:
    """Outputs by tenant, of at most so many tokens in all.

    texts: has a row for each chunk, and nothing else
    """

    def __init__(self, max_tokens: int, texts: Texts) -> None:
        if max_tokens and max_tokens < PARTS * LEAST:
            raise ValueError(f"need shared_tokens of 0 or at least {PARTS * LEAST}")
        self._max_tokens, self.texts = max_tokens, texts
        self._chunks: dict[str, deque[int]] = {}  # a tenant's rows, the latest first
        self._ages: deque[str] = deque()  # the tenant of each chunk, the oldest first
        self._tokens = 0

    def __bool__(self) -> bool:
        return self._max_tokens > 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of all texts."""
        return self.texts.nbytes

    def of(self, tenant: str) -> Sequence[int]:
        """Return the rows that this tenant's requests may look at, the latest first."""
        return self._chunks.get(tenant, ())

    def draft(
        self,
        tenant: str,
        end: tuple[Texts, int],
        most: int,
        width: int,
        min_vote: float,
        trees: bool,
    ) -> Draft[PointMass]:
        """Return what follows the end of a text in this tenant's outputs.

        end: the text, as a row of its own texts
        """
        for row in self.of(tenant):
            given = (row, end, most, width, min_vote, trees)
            tokens, parents, sure = (found.tolist() for found in self.texts.propose_one(*given))
            if tokens:
                return Draft(tuple(tokens), tuple(parents), PointMass(), tuple(sure))
        return chain(())

    def add(self, tenant: str, text: Sequence[int]) -> None:
        """Keep a text, and drop the oldest if that is too much."""
        size = self._max_tokens // PARTS
        if not size or not text:
            return
        chunks = self._chunks.setdefault(tenant, deque())
        if not chunks or self.texts.lengths[chunks[0]] + len(text) > size:
            digest = blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            chunks.appendleft(self.texts.open(int.from_bytes(digest, "little")))
            self._ages.append(tenant)
            self._tokens += self._counted(chunks[0])
        self._tokens -= self._counted(chunks[0])
        self.texts.extend(chunks[0], [*text[: size - 1], SEPARATOR])
        self._tokens += self._counted(chunks[0])
        while self._tokens > self._max_tokens:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        tenant = self._ages.popleft()
        chunks = self._chunks[tenant]
        row = chunks.pop()
        self._tokens -= self._counted(row)
        self.texts.close(row)
        if not chunks:
            del self._chunks[tenant]

    def _counted(self, row: int) -> int:
        return max(LEAST, int(self.texts.lengths[row]))
