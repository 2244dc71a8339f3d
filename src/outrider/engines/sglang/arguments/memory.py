"""What speculation takes on a device beside the target: how many bytes.

*Logits* of verify passes: see `serving.rows`. SGLang reserves 4 GiB for speculation at start-up,
which hold them.

*A draft model* has a cache of as many slots as the target's. SGLang sizes the target's cache as if
it were alone: here a token costs the sum of both. For the draft's weights and graphs DRAFT_RESERVE
is taken from `mem_fraction_static`, unless the user has set it. *Heads* likewise: see `heads`.
"""

from __future__ import annotations

import logging
from typing import Any

from outrider.engines.sglang.versions.base import SglangVersion
from outrider.serving.profile import MODEL, load_profile

logger = logging.getLogger(__name__)

DRAFT_RESERVE = 4 << 30
"""What a draft model's weights and graphs need beside the 4 GiB that SGLang reserves for any
speculation: SGLang's own STANDALONE gets 6 GiB, and the logits come on top of it."""


def num_penalties(orchestrator: Any) -> int:
    """Return how many kinds of penalties a batch of SGLang's has."""
    if not orchestrator.is_required:
        return 0
    return sum(penalizer.is_prepared() for penalizer in orchestrator.penalizers.values())


def draft_cell_bytes(runner: Any, version: SglangVersion) -> int:
    """Return what a token takes in the caches of the draft model and of heads, on each device.

    runner: the target's model runner, or what stands for it while its cache is made
    """
    from outrider.engines.sglang.drafts.heads import draft_kind, head_sources

    args = version.arguments(runner.server_args)
    sources = head_sources(load_profile(), args).values()
    heads = sum(source.cell_bytes(runner.model_config.dtype.itemsize) for source in sources)
    is_model = draft_kind(args) == MODEL
    return heads + (_model_cell_bytes(runner, args, version) if is_model else 0)


def _model_cell_bytes(runner: Any, args: Any, version: SglangVersion) -> int:
    from sglang.srt.configs.model_config import ModelConfig

    config = ModelConfig.from_server_args(
        runner.server_args,
        model_path=args.speculative_draft_model_path,
        model_revision=args.speculative_draft_model_revision,
        is_draft_model=True,
    )
    heads = config.get_num_kv_heads(version.attention_tp_size())
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
