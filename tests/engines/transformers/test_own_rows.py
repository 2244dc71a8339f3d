"""Transformers' own processors, criteria and results under `custom_generate`: equal to plain's."""

from __future__ import annotations

import pytest
import torch
from tiny_models import ids, tiny
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

import outrider


@pytest.fixture(scope="module")
def model():
    return tiny("Llama")


BATCH = torch.tensor([ids(12), ids(12, 2), ids(12)])
END = 5


class OwnText(LogitsProcessor):
    """Rules out the token before the last, and all below the length modulo 7."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, : input_ids.shape[1] % 7] = -torch.inf
        return scores.scatter(1, input_ids[:, -2:-1], -torch.inf)


class TwiceTheSame(StoppingCriteria):
    """Ends a row at its second even token."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, 12:] % 2 == 0).sum(-1) >= 2


def by_row(number, text):
    return [number, 10 + len(text), 20 + int(text[-1]) % 3, 40]


PADDED = {"eos_token_id": 511, "pad_token_id": 0}
"""Rows that end at different times are padded only if there is an end token."""

CASES = {
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": list(range(0, 97, 3))},
    "min_length": {"min_length": 20, "eos_token_id": list(range(0, 97, 3))},
    "suppress_tokens": {"suppress_tokens": list(range(30))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(60))},
    "bad_words_ids": {"bad_words_ids": [[n] for n in range(20)] + [[30, 31]]},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "sequence_bias": {"sequence_bias": [[[n], -9.0] for n in range(50)]},
    "forced_eos_token_id": {"forced_eos_token_id": END},
    "forced_bos_token_id": {"forced_bos_token_id": END},
    "exponential_decay_length_penalty": {
        "exponential_decay_length_penalty": (3, 1.5),
        "eos_token_id": END,
    },
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True, "repetition_penalty": 1.4},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": by_row},
    "a processor": {"logits_processor": LogitsProcessorList([OwnText()])},
    "a criterion": {"stopping_criteria": StoppingCriteriaList([TwiceTheSame()]), **PADDED},
    "all together": {
        "logits_processor": LogitsProcessorList([OwnText()]),
        "stopping_criteria": StoppingCriteriaList([TwiceTheSame()]),
        "no_repeat_ngram_size": 2,
        "repetition_penalty": 1.3,
        **PADDED,
    },
}


def both(model, given, **options):
    """Return what plain `generate` returns, and ours, for each way to draft."""
    options = {
        "max_new_tokens": 20,
        "do_sample": False,
        "attention_mask": torch.ones_like(given),
        **options,
    }
    expected = model.generate(given, **options)
    found = [
        model.generate(given, **options, custom_generate=outrider.custom_generate, drafter=drafter)
        for drafter in ("none", "ngram", model)
    ]
    return expected, found


@pytest.mark.parametrize("name", CASES)
def test_equal_to_plain(model, name):
    expected, found = both(model, BATCH, **CASES[name])
    for ours in found:
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("name", ["suppress_tokens", "no_repeat_ngram_size", "a processor"])
def test_the_case_can_fail(model, name):
    """Each of these changes the answer: a version that ignored it would be seen."""
    plain = model.generate(BATCH, max_new_tokens=20, do_sample=False)
    assert not torch.equal(model.generate(BATCH, max_new_tokens=20, **CASES[name]), plain)


@pytest.mark.parametrize("name", ["typical_p", "epsilon_cutoff", "top_h"])
def test_sampling_processors(model, name):
    """Their distribution is plain's: at their extremes it is one token."""
    extreme = {"typical_p": 1e-6, "epsilon_cutoff": 0.999, "top_h": 1e-6}
    options = {"do_sample": True, "top_k": 0, name: extreme[name]}
    if name not in vars(GenerationConfig()):
        pytest.skip(f"this version of Transformers has no {name}")
    expected, found = both(model, BATCH, **options)
    for ours in found:
        assert torch.equal(ours, expected)


def test_padded_rows_have_plain_penalties(model):
    """Transformers counts the padding token as part of the prompt, and so does Outrider."""
    given, mask = BATCH.clone(), torch.ones_like(BATCH)
    given[0, :5], mask[0, :5] = 0, 0
    expected, found = both(model, given, attention_mask=mask, repetition_penalty=2.0)
    for ours in found:
        assert torch.equal(ours, expected)
    with pytest.raises(outrider.Unsupported, match="padding after a prompt"):
        both(model, given.flip(1), attention_mask=mask.flip(1))


def test_results_with_scores(model):
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, found = both(model, BATCH[:1], **options, repetition_penalty=1.3)
    for ours in found:
        assert torch.equal(ours.sequences, expected.sequences)
        assert len(ours.scores) == len(ours.logits) == 20
        torch.testing.assert_close(torch.cat(ours.scores), torch.cat(expected.scores))
        torch.testing.assert_close(torch.cat(ours.logits), torch.cat(expected.logits))
    _, found = both(model, BATCH, return_dict_in_generate=True)
    assert found[0].scores is None
    with pytest.raises(outrider.Unsupported, match="output_scores for 3 rows"):
        both(model, BATCH, **options)
    with pytest.raises(outrider.Unsupported, match="output_hidden_states"):
        both(model, BATCH[:1], return_dict_in_generate=True, output_hidden_states=True)


@pytest.mark.parametrize("options", [{"max_time": 5.0}, {"guidance_scale": 1.5}])
def test_what_remembers_calls_is_refused(model, options):
    with pytest.raises(outrider.Unsupported, match=next(iter(options))):
        both(model, BATCH, **options)
