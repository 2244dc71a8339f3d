"""The pool of a server, made by its profile."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from outrider.control import AdaptiveDrafter, Control, adaptive_control
from outrider.control.decision import Limits
from outrider.core import Drafter, Unsupported
from outrider.drafters import (
    OURS,
    AheadDrafter,
    GuardedDrafter,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
    OwnRequests,
    make_drafter,
)
from outrider.drafters.compiled import IS_COMPILED
from outrider.serving.pool import Pool, PromptReader
from outrider.serving.profile import ADAPTIVE, DEVICE, HEAD_OPTIONS, LOOKUP, MODEL, Profile
from outrider.serving.ranks import Ranks

logger = logging.getLogger(__name__)


class PoolHead(PromptReader, Protocol):
    """A head of the server."""

    def drafter(self, vocab_size: int, **options: Any) -> ModelDrafter[Any]:
        """Return a drafter with this head."""
        ...


def make_pool(
    profile: Profile,
    names: Sequence[str],
    vocab_size: int,
    *,
    model: Any = None,
    heads: Mapping[str, PoolHead | None] | None = None,
    ranks: Ranks | None = None,
    limits: Limits | None = None,
    device_depths: Mapping[str, int] | None = None,
) -> Pool:
    """Make the drafters of these names, with the profile's options. Raises Unsupported.

    model: the draft model
    heads: those of the server, by name; None on ranks other than 0
    device_depths: of drafters that draft on the device: how many drafts, if that is fixed
    """
    heads = heads or {}
    own = {name: head for name, head in heads.items() if head is not None}
    readers: list[tuple[PromptReader, frozenset[str]]] = []
    if model is not None:
        readers.append((model, frozenset((MODEL, ADAPTIVE))))
    readers += [(head, frozenset((name, ADAPTIVE))) for name, head in own.items()]
    making = _Making(vocab_size, model, own, limits or Limits())
    guards: dict[str, GuardedDrafter] = {}
    for name in names:
        options = {
            option: value
            for option, value in profile.drafters.get(name, {}).items()
            if option not in HEAD_OPTIONS
        }
        try:
            # on ranks other than 0 heads draft nothing
            is_elsewhere = name in heads and name not in own
            drafter = NoDrafter() if is_elsewhere else making.make(name, options)
        except (TypeError, ValueError) as error:
            raise Unsupported(f"drafter {name!r} with {options}", fix=str(error)) from error
        # ours recover by themselves, and a thread takes time in every step
        timeout = profile.draft_timeout if isinstance(drafter, OwnRequests) else None
        guards[name] = GuardedDrafter(drafter, vocab_size, timeout)
    if not IS_COMPILED:
        logger.warning(
            "numba is not installed: looking drafts up takes about 100 times as long; "
            "pip install 'outrider[fast]'"
        )
    return Pool(
        guards,
        control=making.control,
        depths=device_depths or {},
        ranks=ranks or Ranks(),
        model=model,
        readers=readers,
        models=making.models,
        ahead=making.ahead,
        lookup=making.lookup,
    )


class _Making:
    """Makes drafters by name, and keeps what the pool needs of them."""

    def __init__(
        self, vocab_size: int, model: Any, heads: Mapping[str, PoolHead], limits: Limits
    ) -> None:
        self._vocab_size, self._model, self._heads, self._limits = vocab_size, model, heads, limits
        self.control: Control | None = None
        self.models: list[ModelDrafter[Any]] = []
        self.ahead: list[AheadDrafter] = []
        self.lookup: Mapping[str, int] = LOOKUP

    def make(self, name: str, options: dict[str, Any]) -> Drafter:
        """Return a new drafter of this name."""
        if name in self._heads:
            return self._head(name, options)
        if name == ADAPTIVE:
            return self._adaptive(**options)
        if name == DEVICE:
            self.lookup = {**LOOKUP, **options}
            return NgramDrafter(**self.lookup)  # where the device cannot draft
        if name == MODEL:
            return self._own_model(**options)
        drafter = make_drafter(name, options)
        if isinstance(drafter, AheadDrafter):
            self.ahead.append(drafter)
        return drafter if name in OURS else OwnRequests(drafter)

    # models run where the target runs, and would only be in its way in a thread

    def _own_model(self, **options: Any) -> ModelDrafter[Any]:
        if self._model is None:
            raise ValueError("add --speculative-draft-model-path")
        self.models.append(ModelDrafter(self._model, self._vocab_size, **options))
        return self.models[-1]

    def _head(self, name: str, options: Mapping[str, Any]) -> ModelDrafter[Any]:
        self.models.append(self._heads[name].drafter(self._vocab_size, **options))
        return self.models[-1]

    def _adaptive(self, **options: Any) -> AdaptiveDrafter:
        # how far to go is for control to say
        asked = {"min_survival": 0.0, "siblings": 1}
        passing = [] if self._model is None else [self._own_model(**asked)]
        for name in self._heads:
            drafter = self._head(name, asked)
            drafter.rename(name)  # two may be of the same kind
            passing.append(drafter)
        self.control = adaptive_control(passing, limits=self._limits, **options)
        self.ahead += [d for d in self.control.free.values() if isinstance(d, AheadDrafter)]
        return AdaptiveDrafter(self.control)
