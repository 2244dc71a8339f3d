"""Bytes of a draft model's cache, weights and graphs: how they are reserved."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.configs.model_config import ModelConfig

from outrider.engines.sglang.arguments import memory
from outrider.engines.sglang.drafts import heads
from outrider.engines.sglang.hooks.sglang_0_5_11 import Hooks0511
from outrider.engines.sglang.plugin import installed_hooks
from outrider.engines.sglang.versions.sglang_0_5_11 import Sglang0511


def kinds(*prepared):
    """Return SGLang's penalties: of each kind, whether a request has it."""
    penalizers = {i: SimpleNamespace(is_prepared=lambda p=p: p) for i, p in enumerate(prepared)}
    return SimpleNamespace(is_required=any(prepared), penalizers=penalizers)


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
    hooks = Hooks0511(Sglang0511(), load=lambda: None)
    hooks._handle_gpu_memory_settings(sized, args, 80 * 1024)
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
    hooks = installed_hooks()
    if hooks.version.contract.VERSION == "0.5.11":
        monkeypatch.setattr("sglang.srt.layers.dp_attention.get_attention_tp_size", lambda: 2)
    else:
        parallel = SimpleNamespace(attn_tp_size=2)
        monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: parallel)
        monkeypatch.setattr(type(hooks.version), "arguments", lambda self, args: args)

    def cell(**others):
        runner = SimpleNamespace(
            server_args=arguments(**others.pop("args", {})),
            is_draft_worker=False,
            kv_cache_dtype=torch.bfloat16,
        )
        runner.__dict__.update(others)
        return hooks.compute_cell_size(lambda their, mr, layers: 65_536, None, runner, 32)

    assert cell() == 65_536 + 16_384  # of each of two devices
    assert asked == [{"model_path": "draft", "model_revision": None, "is_draft_model": True}]
    assert cell(is_draft_worker=True) == 65_536
    assert cell(args={"speculative_draft_model_path": None}) == 65_536
    assert cell(args={"speculative_algorithm": None}) == 65_536
