"""The server's drafters: made at start-up, guarded, and one of them for each request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from outrider.control import AdaptiveDrafter, adaptive_drafter
from outrider.core import Drafter, Unsupported
from outrider.drafters import (
    GuardedDrafter,
    ModelDrafter,
    RoutedDrafter,
    make_drafter,
)
from outrider.hosts.sglang.draft_model import SglangDraftModel
from outrider.hosts.sglang.profile import ADAPTIVE, MODEL, Profile
from outrider.hosts.tokenizers import check_same_tokens


@dataclass
class Drafters:
    """The server's drafters.

    router: sends each request to the one it chose
    guards: each of them, by name; a fault of one costs speed only
    model: the draft model, if there is one
    fallbacks: requests that went without drafts for reasons outside the drafters
    """

    router: Drafter
    guards: dict[str, GuardedDrafter]
    model: SglangDraftModel | None
    fallbacks: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def make(
        profile: Profile, names: list[str], vocab_size: int, model: SglangDraftModel | None
    ) -> Drafters:
        """Make the drafters of these names, with the profile's options."""
        guards: dict[str, GuardedDrafter] = {}
        for name in names:
            options = profile.drafters.get(name, {})
            if name == ADAPTIVE:
                guards[name] = GuardedDrafter(_adaptive(vocab_size, model, options), vocab_size)
            elif name == MODEL and model is not None:
                # it runs where the target runs, and would only be in its own way in a thread
                drafter: Drafter = ModelDrafter(model, vocab_size, **options)
                guards[name] = GuardedDrafter(drafter, vocab_size)
            else:
                drafter = make_drafter(name, options)
                guards[name] = GuardedDrafter(drafter, vocab_size, profile.draft_timeout)
        return Drafters(RoutedDrafter(guards, _chosen), guards, model)

    def totals(self) -> Counter[str]:
        """Return how many requests went without drafts, by reason."""
        total = Counter(self.fallbacks)
        for guard in self.guards.values():
            total.update(guard.fallbacks)
        return total


def _adaptive(
    vocab_size: int, model: SglangDraftModel | None, options: Mapping[str, Any]
) -> AdaptiveDrafter:
    """Return the drafter that chooses among all others."""
    drafts = None if model is None else ModelDrafter(model, vocab_size, min_survival=0.0)
    try:
        return adaptive_drafter(drafts, **options)
    except TypeError as error:
        raise Unsupported(f"drafter {ADAPTIVE!r} with {dict(options)}", fix=str(error)) from error


def _chosen(request: Any) -> str:
    return str(request.drafter)


def make_draft_model(target_worker: Any, server_args: Any, max_rows: int, **ranks: Any) -> Any:
    """Load the draft model into a worker of SGLang's, beside the target.

    Stops the server unless it reads the target's tokens.
    """
    _check_tokenizers(target_worker, server_args)
    server_args.context_length = target_worker.model_config.context_len
    pool, allocator = target_worker.get_memory_pool()
    worker = TpModelWorker(
        server_args=server_args,
        pp_rank=0,
        is_draft_worker=True,
        req_to_token_pool=pool,
        token_to_kv_pool_allocator=allocator,
        memory_pool_config=target_worker.model_runner.memory_pool_config,
        **ranks,
    )
    return SglangDraftModel(worker, max_rows)


def _check_tokenizers(target_worker: Any, server_args: Any) -> None:
    def load(path: str) -> Any:
        return get_tokenizer(path, trust_remote_code=server_args.trust_remote_code)

    target = target_worker.tokenizer or load(server_args.tokenizer_path)
    try:
        check_same_tokens(target, load(server_args.speculative_draft_model_path))
    except Unsupported as error:
        raise SystemExit(f"outrider: {error}") from error
