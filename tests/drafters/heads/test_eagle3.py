"""EAGLE-3 heads: the pairs that they read, both formats, and what is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch
from by_hand import causal, mlp, norm
from safetensors.torch import load_file, save_file

from outrider.core import (
    Budget,
    KeyedCoins,
    Outcome,
    Request,
    SamplingParams,
    Unsupported,
)
from outrider.drafters.heads import (
    Eagle3Head,
    Eagle3Norms,
    HeadConfig,
    HeadDrafter,
    kind_of,
    load_head,
)
from outrider.drafters.heads.layers import HeadCache, SequencePass, frequencies

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "max_position_embeddings": 256,
    "vocab_size": 40, "draft_vocab_size": 24,
}  # fmt: skip
LAYERS = 6
D2T = torch.tensor([i // 2 for i in range(24)])  # draft id i is target id i + i // 2


@pytest.fixture
def head():
    torch.manual_seed(0)
    made = Eagle3Head(HeadConfig.of(SHAPE), (2, 3, 5), 32).eval()
    made.d2t.copy_(D2T)
    return made


@pytest.fixture
def states():
    return torch.randn(30, 3, 32, generator=torch.Generator().manual_seed(1))


def by_hand(head, tokens, x):
    """Return g after every pair of one sequence, in one pass with loops for attention."""
    layer = head.midlayer
    s = norm(x, layer.hidden_norm)
    both = torch.cat([norm(head.embed_tokens(tokens), layer.input_layernorm), s], -1)
    residual = s if head.norms.norm_before_residual else x
    h = residual + causal(layer.self_attn, both, range(1, len(tokens) + 1))
    return h + mlp(layer.mlp, norm(h, layer.post_attention_layernorm))


@torch.inference_mode()
def test_a_pass_is_the_formula(head, states):
    tokens, x = torch.arange(10) % 40, head.reduce(states[:10])
    expected = by_hand(head, tokens, x)
    cache, found = HeadCache(), []
    for part in ([0, 1, 2, 3], [4], [5, 6, 7, 8, 9]):  # in pieces, as they come
        rows = torch.tensor(part)
        attend = SequencePass([cache], [len(part)])
        found.append(head(tokens[rows], x[rows], rows + 1, attend))
        attend.keep()
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-5, rtol=1e-5)


NORMS = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")


def with_norms(*names):
    torch.manual_seed(3)
    norms = Eagle3Norms(**dict.fromkeys(names, True))
    made = Eagle3Head(HeadConfig.of(SHAPE), (2, 3, 5), 32, norms).eval()
    made.d2t.copy_(D2T)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return made


@pytest.mark.parametrize("names", [(n,) for n in NORMS] + [("fc_norm", "norm_output")])
@torch.inference_mode()
def test_further_norms_are_the_formula(names, states):
    """What is put in the place of x, and the logits, over two steps."""
    head = with_norms(*names)
    f = states[:6]
    if "fc_norm" in names:
        f = torch.stack([norm(f[:, i], head.fc_norm[i]) for i in range(3)], 1)
    f = f.flatten(1)
    x = head.fc(norm(f, head.input_norm) if "norm_before_fc" in names else f)
    torch.testing.assert_close(head.reduce(states[:6]), x, atol=1e-6, rtol=1e-5)
    tokens = torch.tensor([4, 8, 15, 16, 23, 39])
    cache = HeadCache()
    first, own = SequencePass([cache], [6]), SequencePass([cache], [1])
    g = head(tokens, x, torch.arange(1, 7), first)
    first.keep()
    again = head(tokens[:1], g[-1:], torch.tensor([7]), own)
    one = by_hand(head, tokens, x)
    next_x = norm(one, head.norm) if "norm_output" in names else one
    two = by_hand(head, torch.cat([tokens, tokens[:1]]), torch.cat([x, next_x[-1:]]))[-1:]
    for found, expected in ((g, one), (again, two)):
        own_logits = norm(expected, head.norm) @ head.lm_head.weight.T
        drafted = head.logits(found)[:, torch.arange(24) + D2T]
        torch.testing.assert_close(drafted, own_logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("names", [NORMS[:1], NORMS[1:2], NORMS[2:], ()])
@pytest.mark.parametrize("format_", ["specforge", "speculators", "legacy"])
@torch.inference_mode()
def test_further_norms_are_loaded(names, format_, states, tmp_path):
    head = with_norms(*names)
    config = {**(SPECULATORS if format_ == "speculators" else SPECFORGE)}
    config |= dict.fromkeys(names, True)
    path = write(head, tmp_path / "head", config, renamed=format_ == "speculators")
    if format_ == "legacy":
        weights = load_file(path / "model.safetensors")
        old = {
            "fc_norm.0": "aux_norm_low",
            "fc_norm.1": "aux_norm_mid",
            "fc_norm.2": "aux_norm_high",
        }
        weights = {f"{old.get(k[:9], k[:9])}{k[9:]}": v for k, v in weights.items()}
        save_file(weights, path / "model.safetensors")
        legacy = {k: v for k, v in config.items() if k != "fc_norm"}
        legacy |= {"use_aux_norm": True} if "fc_norm" in names else {}
        (path / "config.json").write_text(json.dumps(legacy))
    found = load_head(path, head.embed_tokens.weight.detach(), LAYERS)
    assert found.norms == head.norms
    tokens = torch.arange(5)

    def logits(one):
        x = one.reduce(states[:5])
        return one.logits(one(tokens, x, tokens + 1, SequencePass([HeadCache()], [5])))

    torch.testing.assert_close(logits(found), logits(head))


@torch.inference_mode()
def test_speculators_heads_for_qwen3_normalise_queries_and_keys(head, states, tmp_path):
    config = {**SPECULATORS, "transformer_layer_config": {**SHAPE, "model_type": "qwen3"}}
    path = write(head, tmp_path / "bare", config, renamed=True)
    with pytest.raises(Unsupported, match=r"missing midlayer\.self_attn\.k_norm\.weight"):
        load_head(path, head.embed_tokens.weight.detach(), LAYERS)
    own = {f"midlayer.self_attn.{n}_norm.weight": torch.full((8,), 1.5) for n in "qk"}
    path = write(head, tmp_path / "head", config, renamed=True, **own)
    found = load_head(path, head.embed_tokens.weight.detach(), LAYERS)
    tokens, x = torch.arange(6), head.reduce(states[:6])
    g = found(tokens, x, tokens + 1, SequencePass([HeadCache()], [6]))
    torch.testing.assert_close(g, by_hand(found, tokens, x), atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_without_a_draft_vocabulary_the_output_may_be_the_targets(head, tmp_path):
    config = {k: v for k, v in SPECFORGE.items() if k != "draft_vocab_size"}
    path = write(head, tmp_path / "head", config, **{"lm_head.weight": None, "d2t": None})
    output = torch.randn(40, 32)
    embedding = head.embed_tokens.weight.detach()
    found = load_head(path, embedding, LAYERS, lm_head=output)
    assert torch.equal(found.lm_head.weight, output)
    with pytest.raises(Unsupported, match=r"missing lm_head\.weight"):
        load_head(path, embedding, LAYERS)


@torch.inference_mode()
def test_sequences_do_not_see_each_other(head, states):
    tokens, x = torch.arange(9) % 40, head.reduce(states[:9])
    alone = [
        head(tokens[i:j], x[i:j], torch.arange(1, 1 + j - i), SequencePass([HeadCache()], [j - i]))
        for i, j in ((0, 4), (4, 9))
    ]
    positions = torch.tensor([1, 2, 3, 4, 1, 2, 3, 4, 5])
    together = head(tokens, x, positions, SequencePass([HeadCache(), HeadCache()], [4, 5]))
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-6, rtol=1e-6)


def test_drafts_are_ids_of_the_target(head):
    logits = head.logits(torch.randn(2, 32, generator=torch.Generator().manual_seed(2)))
    assert logits.shape == (2, 40)
    reached = set((torch.arange(24) + D2T).tolist())
    assert {i for i in range(40) if logits[0, i] > -math.inf} == reached


@torch.inference_mode()
def test_drafts_go_on_from_the_heads_own_states(head, states):
    """Greedy drafts of a drafter, fed by outcomes, are those of the formula."""
    text = [3, 9, 14, 7, 22, 1]
    request = Request(0, (3, 9, 14, 7), SamplingParams(max_tokens=20), seed=0)
    drafter = HeadDrafter(head, 40, min_survival=0.0)
    budget = Budget([3], "match", KeyedCoins())
    drafter.start([request])
    assert drafter.propose([request], budget).num_rows == 1, "no states yet, no drafts"

    def told(tokens, rows, hidden):
        outcome = Outcome(request, tuple(tokens), tuple(rows), 0, 0, None, hidden)
        drafter.observe([outcome])
        outcome.apply()

    def expected():
        tokens, x = text[1:], head.reduce(states[: len(text) - 1])
        drafts = []
        for _ in range(3):
            g = by_hand(head, torch.tensor(tokens), x)[-1:]
            drafts.append(int(head.logits(g).argmax()))
            tokens, x = [*tokens, drafts[-1]], torch.cat([x, g])
        return drafts

    told([22, 1], (0, 1), states[:5])  # the prompt's rows, and one that was kept
    assert drafter.propose([request], budget).tokens.tolist() == expected()
    text += [5, 30]  # drafted or not: the target's states replace the head's
    told([5, 30], (0, 1), states[5:7])
    assert drafter.propose([request], budget).tokens.tolist() == expected()
    text += [8]
    told([8], (0,), None)  # a fault: from here on its states are missing
    text += [2]
    told([2], (0,), states[8:9])
    assert drafter.propose([request], budget).num_rows == 1


def write(head, folder, config, renamed=False, **changes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weights = {k: v for k, v in head.state_dict().items() if k != "embed_tokens.weight"}
    weights |= changes
    names = {k: k.replace("midlayer.", "layers.0.") if renamed else k for k in weights}
    save_file({names[k]: v.contiguous() for k, v in weights.items() if v is not None},
              folder / "model.safetensors")  # fmt: skip
    return folder


SPECFORGE = {
    "architectures": ["LlamaForCausalLMEagle3"], **SHAPE,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
}  # fmt: skip
SPECULATORS = {
    "speculators_model_type": "eagle3", "draft_vocab_size": 24, "transformer_layer_config": SHAPE,
    "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
}  # fmt: skip


@pytest.mark.parametrize("format_", ["specforge", "speculators"])
@torch.inference_mode()
def test_both_formats_are_the_same_head(format_, head, states, tmp_path):
    """Their ids differ by one, and name the same layers."""
    config = {"specforge": SPECFORGE, "speculators": SPECULATORS}[format_]
    path = write(head, tmp_path / "head", config, renamed=format_ == "speculators")
    found = load_head(path, head.embed_tokens.weight.detach(), LAYERS)
    assert found.hidden_layers == (2, 3, 5)
    x, tokens = head.reduce(states[:5]), torch.arange(5)

    def logits(one):
        return one.logits(one(tokens, x, tokens + 1, SequencePass([HeadCache()], [5])))

    torch.testing.assert_close(logits(found), logits(head))


def test_without_ids_the_usual_layers_are_read(head, tmp_path):
    path = write(head, tmp_path / "head", {k: v for k, v in SPECFORGE.items() if k[0] != "e"})
    assert load_head(path, head.embed_tokens.weight.detach(), 12).hidden_layers == (2, 6, 9)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fc.weight": None}, "missing fc.weight"),
        ({"surprise": torch.zeros(1)}, "unknown surprise"),
        ({"fc.weight": torch.zeros(32, 64)}, r"of another shape fc.weight: \(32, 64\)"),
        ({"d2t": D2T + 9}, "d2t leaves the vocabulary"),
        ({"d2t": None}, "missing d2t"),
    ],
)
def test_refused_weights(changes, said, head, tmp_path):
    path = write(head, tmp_path / "head", SPECFORGE, **changes)
    with pytest.raises(Unsupported, match=said):
        load_head(path, head.embed_tokens.weight.detach(), LAYERS)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**SPECFORGE, "hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({**SPECFORGE, "rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        ({**SPECFORGE, "eagle_aux_hidden_state_layer_ids": [1, 2, 40]}, "a target with 6"),
        ({**SPECULATORS, "speculators_model_type": "dspark"}, "kind 'dspark'"),
        ({**SPECFORGE, "architectures": ["Qwen2ForCausalLMEagle"]}, "'Qwen2ForCausalLMEagle'"),
        ({**SPECFORGE, "num_hidden_layers": 2}, "has 2 layers"),
        ({**SPECFORGE, "fc_norm": True, "norm_before_fc": True}, "fc_norm and norm_before_fc"),
        ({**SPECFORGE, "fc_norm": True}, r"missing fc_norm\.0\.weight"),
        ({"architectures": ["LlamaForCausalLM"]}, "not a head"),
        ([], "not an object"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "has no 'num_attention_heads'"),
        ({"speculators_model_type": "eagle3"}, "has no 'num_attention_heads'"),
    ],
)
def test_refused_configs(config, said, head, tmp_path):
    path = write(head, tmp_path / "head", config)
    with pytest.raises(Unsupported, match=said):
        load_head(path, head.embed_tokens.weight.detach(), LAYERS)


def test_what_is_not_there_is_named(head, tmp_path):
    embedding = head.embed_tokens.weight.detach()
    with pytest.raises(Unsupported, match=r"config\.json"):
        load_head(tmp_path, embedding, LAYERS)
    (tmp_path / "config.json").write_text(json.dumps(SPECFORGE))
    with pytest.raises(Unsupported, match="no safetensors"):
        load_head(tmp_path, embedding, LAYERS)
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(Unsupported, match=r"model\.safetensors"):
        load_head(tmp_path, embedding, LAYERS)


def test_an_embedding_of_another_width_is_refused(head, tmp_path):
    path = write(head, tmp_path / "head", SPECFORGE)
    with pytest.raises(Unsupported, match="40 x 32, and these are 40 x 16"):
        load_head(path, torch.zeros(40, 16), LAYERS)


def test_a_target_with_too_few_layers_is_refused(head, tmp_path):
    path = write(head, tmp_path / "head", {k: v for k, v in SPECFORGE.items() if k[0] != "e"})
    with pytest.raises(Unsupported, match="of a target with 2"):
        load_head(path, head.embed_tokens.weight.detach(), 2)


def test_kinds():
    assert kind_of(SPECFORGE) == kind_of(SPECULATORS) == "eagle3"
    assert kind_of({"architectures": ["LlamaForCausalLM"]}) == kind_of({}) == "model"
    assert kind_of({**SPECFORGE, "architectures": ["LlamaForCausalLM"]}) == "eagle3"


def test_rotary_frequencies_are_transformers():
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    from transformers import LlamaConfig

    llama3 = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64, "rope_theta": 500.0,
    }  # fmt: skip
    for rope in (llama3, {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}):
        shape = {k: v for k, v in SHAPE.items() if k != "rope_theta"} | {"rope_parameters": rope}
        theirs, _ = functions[rope["rope_type"]](LlamaConfig(**shape), "cpu")
        torch.testing.assert_close(frequencies(HeadConfig.of(shape)), theirs)


def test_angles_stay_exact_in_a_head_of_few_bits(head):
    head = head.to(torch.bfloat16)
    assert head.midlayer.self_attn.q_proj.weight.dtype == torch.bfloat16
    exact = torch.tensor([[5000.0]]) * frequencies(head.config)
    assert torch.equal(head.rotary(torch.tensor([5000])), exact)
