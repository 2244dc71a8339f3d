"""Bytes of logits and of a draft model's cache: how they are bounded and reserved."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.configs.model_config import ModelConfig

from outrider.hosts.sglang import heads, hooks, host_0_5_11, memory
from outrider.hosts.sglang.worker import OutriderWorker

QWEN = 151_936


@pytest.mark.parametrize(
    ("vocab_size", "penalties", "rows"),
    [(QWEN, 0, 1009), (QWEN, 3, 371), (128_256, 0, 1195), (128_256, 3, 440)],
)
def test_logits_stay_within_the_limit(vocab_size, penalties, rows):
    """The figures of docs/sglang-settings.md."""
    assert memory.max_rows(vocab_size, 2, penalties) == rows
    assert rows * memory.row_bytes(vocab_size, 2, penalties) <= memory.LIMIT
    assert (rows + 1) * memory.row_bytes(vocab_size, 2, penalties) > memory.LIMIT


def kinds(*prepared):
    """Return penalties of the host's: of each kind, whether someone has it."""
    penalizers = {i: SimpleNamespace(is_prepared=lambda p=p: p) for i, p in enumerate(prepared)}
    return SimpleNamespace(is_required=any(prepared), penalizers=penalizers)


def test_a_step_with_penalties_has_fewer_rows():
    """256 requests, K = 4: 1,280 rows of Qwen's logits do not fit, with penalties far fewer do."""
    worker = OutriderWorker.__new__(OutriderWorker)
    worker._logits, worker._max_rows = (QWEN, 2), memory.max_rows(QWEN, 2)
    worker._coins, worker._trees = None, True
    worker._drafters = SimpleNamespace(fallbacks=Counter())

    def most(count, *penalties):
        penalties = kinds(*penalties)
        columns = SimpleNamespace(max_tokens=np.full(count, 100), max_drafts=np.full(count, 4))
        worker._requests = SimpleNamespace(columns=columns)
        batch = SimpleNamespace(sampling_info=SimpleNamespace(penalizer_orchestrator=penalties))
        requests = [SimpleNamespace(output=[])] * count
        (drafts,) = set(worker._budget(batch, requests, np.arange(count)).max_drafts.tolist())
        return drafts

    assert (most(200), most(256), most(256, True, True, True)) == (4, 2, 0)
    assert worker._drafters.fallbacks == {"rows": 512}


def test_penalties_are_counted_by_kind():
    assert memory.num_penalties(kinds(False, False)) == 0
    assert memory.num_penalties(kinds(True, False, True)) == 2


def arguments(**others):
    return SimpleNamespace(
        **{
            "speculative_algorithm": "OUTRIDER",
            "speculative_draft_model_path": "draft",
            "speculative_draft_model_revision": None,
            "mem_fraction_static": None,
            "device": "cuda",
            **others,
        }
    )


@pytest.mark.parametrize(
    ("others", "fraction"),
    [
        ({}, 0.75),
        ({"mem_fraction_static": 0.7}, 0.7),  # the user's word
        ({"speculative_draft_model_path": None}, 0.8),
        ({"speculative_algorithm": "EAGLE"}, 0.8),
        ({"device": "cpu"}, 0.8),
    ],
    ids=str,
)
def test_memory_is_left_for_a_draft_model(others, fraction):
    def sized(args, gpu_mem):
        args.mem_fraction_static = args.mem_fraction_static or 0.8

    args = arguments(**others)
    host_0_5_11._handle_gpu_memory_settings(sized, args, 80 * 1024)
    assert args.mem_fraction_static == fraction


def test_a_token_costs_both_caches(monkeypatch):
    """Llama-3.1-8B beside Llama-3.2-1B in bf16: 128 KiB and 32 KiB a token."""
    config = SimpleNamespace(
        **{"num_hidden_layers": 16, "head_dim": 64, "v_head_dim": 64},
        get_num_kv_heads=lambda tp_size: 8 // tp_size,
    )
    asked = []

    def load(args, **options):
        asked.append(options)
        return config

    monkeypatch.setattr(ModelConfig, "from_server_args", staticmethod(load))
    monkeypatch.setattr(
        heads, "draft_kind", lambda args: args.speculative_draft_model_path and "model"
    )
    monkeypatch.setattr("sglang.srt.layers.dp_attention.get_attention_tp_size", lambda: 2)

    def cell(**others):
        runner = SimpleNamespace(
            server_args=arguments(**others.pop("args", {})),
            is_draft_worker=False,
            kv_cache_dtype=torch.bfloat16,
        )
        runner.__dict__.update(others)
        return hooks.compute_cell_size(lambda self, mr, layers: 65_536, None, runner, 32)

    assert cell() == 65_536 + 16_384  # of each of two devices
    assert asked == [{"model_path": "draft", "model_revision": None, "is_draft_model": True}]
    assert cell(is_draft_worker=True) == 65_536
    assert cell(args={"speculative_draft_model_path": None}) == 65_536
    assert cell(args={"speculative_algorithm": None}) == 65_536
