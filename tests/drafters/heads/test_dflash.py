"""DFlash heads: the formula, one pass a proposal, honest distributions, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
from by_hand import attend, keys_values, mlp, norm
from safetensors.torch import save_file

from outrider.core import (
    Budget,
    KeyedCoins,
    Outcome,
    PointMass,
    Request,
    Sampled,
    SamplingParams,
    Unsupported,
)
from outrider.drafters.heads import (
    Block,
    DFlashDrafter,
    DFlashHead,
    HeadConfig,
    blocks,
    head_layers,
    kind_of,
    load_head,
)
from outrider.drafters.heads.blocks import BlockModel

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "max_position_embeddings": 256,
    "vocab_size": 40, "model_type": "qwen3", "num_hidden_layers": 2,
}  # fmt: skip
LAYERS, SIZE, MASK = 6, 5, 39


@pytest.fixture
def head():
    torch.manual_seed(0)
    made = DFlashHead(HeadConfig.of(SHAPE), (2, 3, 5), Block(SIZE, MASK))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made.eval().requires_grad_(False)


@pytest.fixture
def states():
    return torch.randn(30, 3, 32, generator=torch.Generator().manual_seed(1))


def by_hand(head, states, token):
    """Return the logits of the drafts after a token that follows these states, [SIZE - 1, V]."""
    length = len(states)
    c = norm(head.fc(states.flatten(1)), head.hidden_norm)
    x = head.embed_tokens(torch.tensor([token] + [MASK] * (SIZE - 1)))
    places, past = range(length, length + SIZE), range(length)
    for layer in head.layers:
        u = norm(x, layer.input_layernorm)
        parts = keys_values(layer.self_attn, c, past), keys_values(layer.self_attn, u, places)
        keys, values = (torch.cat(both) for both in zip(*parts, strict=True))
        sees = [list(range(length + SIZE))] * SIZE
        x = x + attend(layer.self_attn, u, places, keys, values, sees)
        x = x + mlp(layer.mlp, norm(x, layer.post_attention_layernorm))
    return norm(x, head.norm)[1:] @ head.lm_head.weight.T


@torch.inference_mode()
def test_a_block_is_the_formula(head, states):
    """Two sequences side by side; one reads its context in pieces."""
    model = BlockModel(head)
    a, b = model.open(None), model.open(None)
    a.tell(0, head.reduce(states[:9]))
    b.tell(0, head.reduce(states[10:16]))
    model.catch_up([(a, [1, 2, 3, 4])])
    found = model.extend([(a, [5, 6, 7, 8, 9, 11]), (b, [0, 0, 0, 0, 0, 0, 12])])
    rest = [model.extend([(a, [1]), (b, [2])]) for _ in range(SIZE - 2)]
    blocks = torch.stack([found, *rest], 1)
    torch.testing.assert_close(blocks[0], by_hand(head, states[:9], 11), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(blocks[1], by_hand(head, states[10:16], 12), atol=1e-5, rtol=1e-5)
    assert (a.cache.length, b.cache.length) == (9, 6), "the block is not kept"
    assert (a.length, b.length) == (9 + SIZE - 1, 6 + SIZE - 1)


@torch.inference_mode()
@pytest.mark.parametrize("drafts_at_once", [1, 2, SIZE])
def test_logits_are_computed_for_a_few_drafts_at_once(head, states, drafts_at_once, monkeypatch):
    """However many fit, they are the same; and a sequence may stop before the others."""
    monkeypatch.setattr(blocks, "LOGIT_BYTES", 2 * drafts_at_once * 4 * 40)
    counts, of = [], head.logits
    monkeypatch.setattr(head, "logits", lambda x: counts.append(len(x)) or of(x))
    model = BlockModel(head)
    a, b = model.open(None), model.open(None)
    a.tell(0, head.reduce(states[:9]))
    b.tell(0, head.reduce(states[10:16]))
    found = [model.extend([(a, [0] * 9 + [11]), (b, [0] * 6 + [12])])[0]]
    found += [model.extend([(a, [1])])[0] for _ in range(SIZE - 2)]
    expected = by_hand(head, states[:9], 11)
    torch.testing.assert_close(torch.stack(found), expected, atol=1e-5, rtol=1e-5)
    assert counts[0] == 2 * min(drafts_at_once, SIZE - 1)


class Counted(DFlashHead):
    """Counts its passes."""

    passes = 0

    def forward(self, tokens, positions, attend):
        Counted.passes += 1
        return super().forward(tokens, positions, attend)


@torch.inference_mode()
def test_one_pass_a_proposal(head, states):
    """Greedy drafts of a drafter, fed by outcomes, are those of the formula."""
    head.__class__, Counted.passes = Counted, 0
    text = [3, 9, 14, 7]
    request = Request(0, tuple(text), SamplingParams(max_tokens=20), seed=0)
    drafter = DFlashDrafter(head, 40, min_survival=0.0)
    budget = Budget([9], "match", KeyedCoins())
    drafter.start([request])
    assert drafter.propose([request], budget).num_rows == 1, "no states yet, no drafts"

    def told(tokens, hidden):
        outcome = Outcome(request, tuple(tokens), tuple(range(len(tokens))), 0, 0, None, hidden)
        drafter.observe([outcome])
        outcome.apply()
        text.extend(tokens)

    def expected():
        return by_hand(head, states[: len(text) - 1], text[-1]).argmax(-1).tolist()

    told([22, 1], states[:5])
    proposal = drafter.propose([request], budget)
    assert proposal.tokens.tolist() == expected()
    assert Counted.passes == 1
    told([5, 30], states[5:7])
    few = drafter.propose([request], Budget([2], "match", KeyedCoins()))
    assert few.tokens.tolist() == expected()[:2]
    told([8], None)  # a fault: from here on its states are missing
    told([2], states[8:9])
    assert drafter.propose([request], budget).num_rows == 1
    assert Counted.passes == 2


def drafted(head, states, rule, **sampling):
    request = Request(0, (3, 9, 14), SamplingParams(max_tokens=20, **sampling), seed=0)
    drafter = DFlashDrafter(head, 40, min_survival=0.0, siblings=1)
    drafter.start([request])
    outcome = Outcome(request, (4,), (0,), 0, 0, None, states[:3])
    drafter.observe([outcome])
    outcome.apply()
    (draft,) = drafter.propose([request], Budget([9], rule, KeyedCoins())).drafts()
    return draft


@torch.inference_mode()
def test_each_draft_has_its_own_row(head, states):
    rows = by_hand(head, states[:3], 4)
    for rule in ("residual", "block"):
        draft = drafted(head, states, rule, temperature=0.7)
        assert isinstance(draft.distribution, Sampled)
        expected = (rows / 0.7).softmax(-1)
        torch.testing.assert_close(draft.distribution.q, expected, atol=1e-5, rtol=1e-4)
        sure = expected[range(SIZE - 1), list(draft.tokens)].tolist()
        assert draft.confidences == pytest.approx(sure, rel=1e-3)
    greedy = drafted(head, states, "residual")
    assert torch.equal(greedy.distribution.q.argmax(-1), torch.tensor(greedy.tokens))
    assert greedy.distribution.q.max(-1).values.tolist() == [1.0] * (SIZE - 1)


@torch.inference_mode()
def test_with_match_the_drafts_use_the_targets_coins(head, states):
    draft = drafted(head, states, "match", temperature=0.7)
    assert isinstance(draft.distribution, PointMass)
    rows = by_hand(head, states[:3], 4) / 0.7
    positions = torch.arange(3, 3 + SIZE - 1)
    coins = KeyedCoins().draw(rows, torch.zeros_like(positions), positions)
    assert list(draft.tokens[: SIZE - 1]) == coins.tolist()
    assert len(draft.tokens) == 2 * (SIZE - 1), "the budget has room for siblings"


@torch.inference_mode()
def test_penalties_see_the_drafts_before(head, states):
    """A token that was drafted is ruled out, so no draft comes twice."""
    draft = drafted(head, states, "match", presence_penalty=1e6)
    chain = draft.tokens[: SIZE - 1]
    assert len({*chain, 4}) == SIZE


def test_a_pass_that_cannot_pay_is_not_made(head, states):
    request = Request(0, (3, 9, 14), SamplingParams(max_tokens=20), seed=0)
    drafter = DFlashDrafter(head, 40)
    drafter.start([request])
    outcome = Outcome(request, (4,), (0,), 0, 0, None, states[:3])
    drafter.observe([outcome])
    outcome.apply()
    budget = Budget([9], "match", KeyedCoins(), min_gain=SIZE - 0.5)
    assert drafter.propose([request], budget).num_rows == 1
    budget = Budget([9], "match", KeyedCoins(), min_gain=SIZE - 1.5)
    assert drafter.propose([request], budget).num_rows > 1


SGLANG = {
    **SHAPE, "architectures": ["DFlashDraftModel"], "block_size": SIZE,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 2, 4]},
}  # fmt: skip
SPECULATORS = {
    "speculators_model_type": "dflash", "transformer_layer_config": SHAPE, "block_size": SIZE,
    "mask_token_id": MASK, "aux_hidden_state_layer_ids": [2, 3, 5], "draft_vocab_size": 40,
}  # fmt: skip


def write(head, folder, config, **changes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shared = ("embed_tokens.weight", "lm_head.weight", "d2t")
    weights = {k: v for k, v in head.state_dict().items() if k not in shared} | changes
    save_file({k: v.contiguous() for k, v in weights.items() if v is not None},
              folder / "model.safetensors")  # fmt: skip
    return folder


def load(path, head):
    return load_head(path, head.embed_tokens.weight.detach(), LAYERS,
                     lm_head=head.lm_head.weight.detach())  # fmt: skip


def logits(head, states):
    model = BlockModel(head)
    sequence = model.open(None)
    sequence.tell(0, head.reduce(states[:4]))
    model.extend([(sequence, [0, 0, 0, 0, 7])])
    return head.logits(sequence.block.states)


@pytest.mark.parametrize("config", [SGLANG, SPECULATORS], ids=["sglang", "speculators"])
@torch.inference_mode()
def test_both_formats_are_the_same_head(config, head, states, tmp_path):
    found = load(write(head, tmp_path / "head", config), head)
    assert kind_of(config) == "dflash"
    assert (found.hidden_layers, found.block) == ((2, 3, 5), Block(SIZE, MASK))
    torch.testing.assert_close(logits(found, states), logits(head, states))


@torch.inference_mode()
def test_a_smaller_vocabulary(head, states, tmp_path):
    """speculators may give the head an output of its own."""
    own = {"lm_head.weight": torch.randn(10, 32), "d2t": torch.arange(10)}
    config = {**SPECULATORS, "draft_vocab_size": 10}
    found = load(write(head, tmp_path / "head", config, **own), head)
    reached = {i for i in range(40) if logits(found, states)[0, i] > -math.inf}
    assert reached == set(range(0, 20, 2))
    with pytest.raises(Unsupported, match=r"missing d2t, lm_head\.weight"):
        load(write(head, tmp_path / "bare", config), head)


@pytest.mark.parametrize(
    ("count", "layers", "expected"), [(1, 12, (7,)), (2, 12, (2, 10)), (5, 36, (2, 10, 18, 26, 34))]
)
def test_without_ids_the_usual_layers_are_read(count, layers, expected):
    config = {"architectures": ["DFlashDraftModel"], "num_hidden_layers": count}
    assert head_layers(config, layers) == expected
    usual = (2, layers // 2, layers - 3)
    assert head_layers({"speculators_model_type": "dflash"}, layers) == usual


def test_a_head_of_more_layers_than_the_target_is_refused():
    """Before a list of them is made."""
    config = {"num_hidden_layers": 10**9, "dflash_config": {"block_size": 4}}
    with pytest.raises(Unsupported, match="1000000000 layers, for a target with 36"):
        head_layers(config, 36, "dflash")
    # one that says what it reads may have any number of its own
    assert head_layers({**config, "target_layer_ids": [1, 3]}, 4, "dflash") == (2, 4)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"dflash_config": {"mask_token_id": MASK, "selector_rank": 4}}, "selector_rank"),
        ({"is_causal": True}, "is_causal"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"dflash_config": {"target_layer_ids": [1, 2, 4]}}, "no mask_token_id"),
        ({"block_size": None}, "no block_size"),
        ({"block_size": 1}, r"Block\(size=1"),
        ({"dflash_config": {"mask_token_id": 40}}, "mask_token_id=40"),
        ({"dflash_config": {"target_layer_ids": [1, 2, 6]}}, "a target with 6"),
        ({"architectures": ["DFlash2DraftModel"]}, "'DFlash2DraftModel'"),
        ({"num_hidden_layers": 3}, "missing layers.2"),
    ],
)
def test_refused_configs(more, said, head, tmp_path):
    path = write(head, tmp_path / "head", {**SGLANG, **more})
    with pytest.raises(Unsupported, match=said):
        load(path, head)


def test_refused_weights(head, tmp_path):
    path = write(head, tmp_path / "head", SGLANG, **{"fc.weight": torch.zeros(32, 64)})
    with pytest.raises(Unsupported, match=r"of another shape fc.weight: \(32, 64\)"):
        load(path, head)
    path = write(head, tmp_path / "other", SGLANG, **{"prefix_gru.bias": torch.zeros(1)})
    with pytest.raises(Unsupported, match="unknown prefix_gru"):
        load(path, head)
