"""The table of memory against numbers by hand: Qwen2.5 1.5B with 0.5B as its draft."""

from __future__ import annotations

import pytest
from paper import QWEN_1_5B

from outrider.doctor.memory import Room, budget, check_memory, kv_bytes
from outrider.doctor.model import read_model
from outrider.doctor.pair import Plan

GIB = 2**30
GPU = Room(24 * GIB, "a GPU", is_gpu=True)
PLAN = Plan(requests=8, context=4096, drafts=4)


def table(found):
    return {row.what: row.bytes for row in found.rows}


def test_by_hand(qwen):
    found = budget(*qwen, PLAN, GPU)
    assert table(found) == {
        "weights, target": 3_087_428_608,
        "weights, draft": 988_065_536,
        # 2 x 28 x 2 x 128 x 2 = 28,672 and 2 x 24 x 2 x 64 x 2 = 12,288 bytes a token
        "KV cache, target": 28_672 * 32_768,
        "KV cache, draft": 12_288 * 32_768,
        # 8 x 5 rows of the target, 8 of the draft
        "workspace, logits": 48 * 151_936 * 14,
        # 8 splits of 256 keys and 4 of 512, 12 heads of 128 and two sums
        "workspace, attention": 40 * 12 * 12 * 130 * 4,
        "workspace, prompts": 4096 * (2 * 1536 + 3 * 8960) * 2,
    }
    assert found.total == sum(table(found).values())
    rest = found.total - 40_960 * 32_768
    assert found.fitting == int((24 * GIB * 0.9 - rest) // 40_960)
    # SGLang sizes the caches of both by it, but not the draft's weights
    taken = 3_087_428_608 + found.fitting * 40_960
    assert found.static_fraction == pytest.approx(taken / (24 * GIB))


def test_the_split_is_the_kernels_own(qwen):
    pytest.importorskip("torch")
    from outrider.kernels.paged_attention import Tile
    from outrider.kernels.paged_attention.splits import num_splits

    for length in (256, 257, 2048, 2049, 4096, 16384, 16385, 32768):
        plan = Plan(requests=1, context=length, drafts=0)
        splits = num_splits(length, Tile.fit(6).split)
        assert table(budget(*qwen, plan, GPU))["workspace, attention"] == splits * 12 * 130 * 4


def test_kv_of_grouped_heads_on_many_devices(qwen):
    """Heads are shared out; where there are more devices than heads, each keeps one."""
    per_token = [kv_bytes(qwen[0], Plan(tp=tp))[0] for tp in (1, 2, 4)]
    assert per_token == [28_672, 14_336, 14_336]
    assert table(budget(*qwen, Plan(tp=2), GPU))["weights, target"] == 3_087_428_608 // 2


def test_dtype_counts_for_weights_and_cache(qwen):
    plan = Plan(requests=8, context=4096, dtype="float32")
    found = table(budget(*qwen, plan, GPU))
    assert found["weights, target"] == 2 * 3_087_428_608
    assert found["KV cache, target"] == 2 * 28_672 * 32_768


def test_packed_weights_stay_packed(make):
    config = QWEN_1_5B | {"quantization_config": {"quant_method": "awq"}}
    model = read_model(
        str(make("awq", config, {"model.layers.0.qweight": (10, 10)}, dtype="I32", each=4))
    )
    assert table(budget(model, None, Plan(dtype="float32"), GPU))["weights, target"] == 400


def test_few_bits_are_a_copy_beside_the_weights(qwen):
    found = table(budget(*qwen, Plan(draft_bits=8), Room(24 * GIB, "a CPU", is_gpu=False)))
    assert found["weights, draft"] == 988_065_536
    assert 494_032_768 * 0.99 < found["weights, draft in 8 bits"] < 494_032_768 * 1.01


def test_the_default_length_is_at_most_4096(qwen, make):
    assert Plan().length(qwen[0]) == 4096
    short = read_model(str(make("short", QWEN_1_5B | {"max_position_embeddings": 512}, {})))
    assert Plan().length(short) == 512


@pytest.mark.parametrize(
    ("gib", "level"), [(24, "ok"), (5.5, "warning"), (4.8, "warning"), (4, "problem")]
)
def test_what_fits(qwen, gib, level):
    found = budget(*qwen, PLAN, Room(int(gib * GIB), "a GPU", is_gpu=True))
    finding = next(iter(check_memory(found, PLAN, qwen[0], True)))
    assert finding.level == level
    if level == "warning":
        can = int(finding.fix.split("--requests ")[1].split(",")[0])
        fewer = Plan(requests=can, context=4096)
        refound = budget(*qwen, fewer, found.room)
        assert next(iter(check_memory(refound, fewer, qwen[0], True))).level == "ok"


def test_latent_attention_is_not_known(make):
    model = read_model(str(make("mla", QWEN_1_5B | {"kv_lora_rank": 512})))
    found = budget(model, None, PLAN, GPU)
    assert not found.complete
    (finding,) = check_memory(found, PLAN, model, False)
    assert (finding.level, "KV cache, target" in finding.why) == ("note", True)
    assert found.fitting is None
