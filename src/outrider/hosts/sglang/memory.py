"""What speculation takes on a device beside the target: how many bytes, and how they are bounded.

*Logits.* A step over N = B (K + 1) rows has logits for each of them, and sampling makes copies. In
bytes for each row and token of the vocabulary:

    logits, as the model computes them            2 or 4
    logits in float32, for the sampler            4
    probabilities                                 4
    rows of one sampling kind beside the others   4
    each kind of penalty: its counts, and what
    they were before the drafts of a path         8

With a vocabulary of 151,936 that is 2.1 MB a row, and 5.8 MB with three kinds of penalties: 1,280
rows (256 requests, K = 4) would take 2.7 or 7.4 GB. LIMIT bounds the rows of a step instead. SGLang
reserves 4 GiB for speculation at start-up, which hold LIMIT.

*A draft model* has a cache of as many slots as the target's. SGLang sizes the target's cache as if
it were alone: here a token costs the sum of both. For the draft's weights and graphs DRAFT_RESERVE
is taken from `mem_fraction_static`, unless the user has set it. *Heads* likewise: see `heads`.
"""

from __future__ import annotations

import logging
from typing import Any

from outrider.hosts.sglang.host import host
from outrider.hosts.sglang.profile import MODEL, load_profile

logger = logging.getLogger(__name__)

GIB = 1 << 30

LIMIT = 2 * GIB
"""Bytes that [N, V] tensors may take in one step."""

DRAFT_RESERVE = 4 * GIB
"""What a draft model's weights and graphs need beside the 4 GiB that SGLang reserves for any
speculation: SGLang's own STANDALONE gets 6 GiB, and LIMIT comes on top of it."""


def row_bytes(vocab_size: int, logit_bytes: int = 2, penalties: int = 0) -> int:
    """Return what the logits of one row take while they are sampled from.

    penalties: kinds of them that the batch has: frequency, presence, repetition
    """
    return vocab_size * (logit_bytes + 12 + 8 * penalties)


def max_rows(vocab_size: int, logit_bytes: int = 2, penalties: int = 0) -> int:
    """Return how many rows a step may have, so that their logits stay within LIMIT."""
    return max(1, LIMIT // row_bytes(vocab_size, logit_bytes, penalties))


def num_penalties(orchestrator: Any) -> int:
    """Return how many kinds of penalties a batch of SGLang's has."""
    if not orchestrator.is_required:
        return 0
    return sum(penalizer.is_prepared() for penalizer in orchestrator.penalizers.values())


def draft_cell_bytes(runner: Any) -> int:
    """Return what a token takes in the caches of the draft model and of heads, on each device.

    runner: the target's model runner, or what stands for it while its cache is made
    """
    from outrider.hosts.sglang.heads import draft_kind, head_sources

    args = host().arguments(runner.server_args)
    sources = head_sources(load_profile(), args).values()
    heads = sum(source.cell_bytes(runner.model_config.dtype.itemsize) for source in sources)
    is_model = draft_kind(args) == MODEL
    return heads + (_model_cell_bytes(runner, args) if is_model else 0)


def _model_cell_bytes(runner: Any, args: Any) -> int:
    from sglang.srt.configs.model_config import ModelConfig

    config = ModelConfig.from_server_args(
        runner.server_args,
        model_path=args.speculative_draft_model_path,
        model_revision=args.speculative_draft_model_revision,
        is_draft_model=True,
    )
    heads = config.get_num_kv_heads(host().attention_tp_size())
    dims = config.head_dim + config.v_head_dim
    return int(config.num_hidden_layers * heads * dims * runner.kv_cache_dtype.itemsize)


def reserve(server_args: Any, device_mib: float) -> None:
    """Leave room for a draft model's weights and graphs, as SGLang does for its own.

    device_mib: the device's memory
    """
    if server_args.speculative_draft_model_path is None:
        return
    fraction = server_args.mem_fraction_static - DRAFT_RESERVE / (device_mib * (1 << 20))
    server_args.mem_fraction_static = round(max(0.1, fraction), 3)
    logger.info("mem_fraction_static = %.3f: the draft model's share is left out", fraction)
