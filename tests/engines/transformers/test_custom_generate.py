"""`model.generate(..., custom_generate=outrider.custom_generate)`: every argument is decided."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from threading import Thread

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderRepetitionPenaltyLogitsProcessor,
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    MaxLengthCriteria,
    MaxTimeCriteria,
    RepetitionPenaltyLogitsProcessor,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
    TopKLogitsWarper,
)

import outrider
from outrider.engines.transformers import arguments
from outrider.engines.transformers.arguments import NEUTRAL, REFUSED, SUPPORTED, check_arguments

ROOT = Path(__file__).parents[3]


@pytest.fixture
def ask(pair):
    """Call `generate` of the tiny target: `ask(...)` with Outrider, `ask.plain(...)` without."""
    target, draft, tok, prompts = pair

    def call(ids=None, **options):
        ids = torch.tensor([prompts[0]]) if ids is None else ids
        options = {"max_new_tokens": 24, "do_sample": False} | options
        return target.generate(ids, **options)

    def ours(ids=None, **options):
        return call(ids, custom_generate=outrider.custom_generate, **options)

    ours.plain = call
    return ours


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.given, self.ends = [], 0

    def put(self, tokens):
        self.given.append(tokens.tolist())

    def end(self):
        self.ends += 1


@pytest.fixture
def batch(pair):
    """Return the prompts padded to the left, and their mask."""
    target, draft, tok, prompts = pair
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return ids, {"attention_mask": mask}


def test_every_argument_of_the_installed_version_is_decided():
    decided = {*SUPPORTED, *NEUTRAL, *REFUSED}
    assert len(decided) == len(SUPPORTED) + len(NEUTRAL) + len(REFUSED)
    assert arguments.known_arguments() <= decided
    # what `generate` takes from its keyword arguments by name
    read = r"""kwargs(?:\.pop\(|\.get\(|\[)["'](\w+)["']"""
    source = inspect.getsource(inspect.unwrap(GenerationMixin.generate))
    source += inspect.getsource(GenerationMixin._extract_generation_mode_kwargs)
    taken = set(re.findall(rf"(?<!_){read}", source))
    assert {"tokenizer", "max_length"} <= taken <= decided


@pytest.mark.parametrize(
    ("row", "names"), [("supported", SUPPORTED), ("neutral", NEUTRAL), ("refused", REFUSED)]
)
def test_the_page_lists_every_argument(row, names):
    page = (ROOT / "docs" / "transformers.md").read_text()
    (listed,) = re.findall(rf"^\| {row} \|.*\| (.*) \|$", page, re.MULTILINE)
    assert re.findall(r"`(\w+)`", listed) == sorted(names)


def test_twin_an_argument_of_a_later_version_is_refused(monkeypatch):
    monkeypatch.setattr(arguments, "known_arguments", lambda: {"warp_factor"})
    config = GenerationConfig()
    config.warp_factor = 9
    with pytest.raises(outrider.Unsupported, match="warp_factor=9 in custom_generate; leave it"):
        check_arguments(config, {}, {})


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_refused_says_what_to_do(name):
    for given in ({}, {name: None}):
        check_arguments(GenerationConfig(), given, {})
    with pytest.raises(outrider.Unsupported, match=f"{name}='something' in") as refused:
        check_arguments(GenerationConfig(), {name: "something"}, {})
    assert refused.value.fix == REFUSED[name]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_lookup_num_tokens": 5}, "prompt_lookup_num_tokens=5 .* drafter='ngram'"),
        ({"num_assistant_tokens": 5}, "num_assistant_tokens=5 in custom_generate; use max_drafts"),
        ({"num_beams": 2}, "num_beams=2"),
        ({"max_time": 5.0}, "max_time=5.0"),
        ({"stopping_criteria": [MaxTimeCriteria(5.0)]}, "MaxTimeCriteria .* remembers its calls"),
        (
            {
                "logits_processor": [
                    EncoderRepetitionPenaltyLogitsProcessor(1.5, torch.zeros(1, 2).long())
                ]
            },
            "EncoderRepetitionPenaltyLogitsProcessor .* all rows",
        ),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6"),
        ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'"),
        ({"synced_gpus": True}, "synced_gpus=True"),
        ({"past_key_values": DynamicCache()}, "past_key_values=DynamicCache"),
        ({"position_ids": torch.zeros(1, 2, dtype=torch.int64)}, "position_ids=Tensor"),
        ({"exactness": "bitwize"}, "exactness='bitwize'"),
        ({"drafter": "eagle"}, "drafter 'eagle'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_be_left_undone_is_refused(ask, options, message):
    streamer = Recorder() if "num_beams" not in options else None
    with pytest.raises(outrider.Unsupported, match=message):
        ask(streamer=streamer, **options)
    assert streamer is None or streamer.ends == 1  # nobody waits for it


def test_assistants_are_refused_and_criteria_of_ones_own_are_read(ask, pair):
    target, draft, tok, prompts = pair
    with pytest.raises(outrider.Unsupported, match=r"assistant_model=GPT2LMHeadModel .* drafter="):
        ask(assistant_model=draft)
    with pytest.raises(outrider.Unsupported, match="assistant_tokenizer="):
        ask(assistant_tokenizer=tok)
    criteria = {"stopping_criteria": [StopStringCriteria(tok, ["road"])]}
    assert torch.equal(ask(**criteria), ask.plain(**criteria))


def test_the_answer_is_that_of_transformers(ask, batch, pair):
    ids, mask = batch
    expected = ask.plain(ids, **mask, max_new_tokens=30)
    assert torch.equal(ask(ids, **mask, max_new_tokens=30, drafter=pair[1]), expected)
    # end tokens of the call, not of the model
    end = expected[0, ids.shape[1] + 5].item()
    expected = ask.plain(ids, **mask, eos_token_id=end)
    assert torch.equal(ask(ids, **mask, eos_token_id=end), expected)
    # as values of a configuration, and through a function of one's own
    config = GenerationConfig(max_new_tokens=9, eos_token_id=end, pad_token_id=7)
    expected = ask.plain(ids, **mask, generation_config=config)
    found = ask.plain(
        ids,
        **mask,
        generation_config=config,
        custom_generate=lambda *args, **more: outrider.custom_generate(*args, **more),
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False, "early_stopping": True, "output_scores": True},
        {"cache_implementation": "static"},
        {"repetition_penalty": 1.3},
        {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.3)]},
        {"stopping_criteria": [MaxLengthCriteria(11)]},
        {"stopping_criteria": [EosTokenCriteria([300, 11])], "eos_token_id": 12},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_is_supported_or_neutral_gives_the_same_tokens(ask, options):
    expected = ask.plain(**options)
    assert torch.equal(ask(**options), expected)


def test_processors_of_ones_own_are_read(ask):
    """A temperature and a top_k given as objects; with one token left, sampling is greedy."""
    only = {"do_sample": True, "logits_processor": [TopKLogitsWarper(1)]}
    assert torch.equal(ask(**only, top_k=0), ask.plain())
    cold = {"do_sample": True, "logits_processor": [TemperatureLogitsWarper(1e-4)]}
    assert torch.equal(ask(**cold), ask.plain())
    assert torch.equal(ask(**only, top_k=5), ask.plain())


def test_several_answers_to_one_prompt(ask):
    torch.manual_seed(0)
    found = ask(do_sample=True, num_return_sequences=4, temperature=1.5)
    assert len(found) == 4
    assert len({tuple(row) for row in found.tolist()}) > 1


@pytest.mark.parametrize("ends", [-1, [600, 11], [-1, 11, 12]])
def test_end_tokens_that_no_model_emits(ask, ends):
    expected = ask.plain(eos_token_id=ends, pad_token_id=0)
    assert torch.equal(ask(eos_token_id=ends, pad_token_id=0), expected)


@pytest.mark.parametrize("how", ["criteria", "strings"])
def test_rows_that_end_are_padded_if_they_are_in_transformers(ask, batch, pair, how):
    """Without an end token, plain `generate` goes on with a row until all rows have ended."""
    target, draft, tok, prompts = pair
    ids, mask = batch
    word = tok.decode(ask.plain(ids, **mask)[0, -5])
    stops = {"stopping_criteria": [StopStringCriteria(tok, [word])]}
    if how == "strings":
        stops = {"stop_strings": word, "tokenizer": tok}
    for ends in ([11], [-1]):
        options = {**mask, **stops, "eos_token_id": ends, "pad_token_id": 0}
        assert torch.equal(ask(ids, **options), ask.plain(ids, **options))
    target.generation_config.eos_token_id, before = None, target.generation_config.eos_token_id
    try:
        with pytest.raises(outrider.Unsupported, match="without an end token"):
            ask(ids, **mask, **stops)
        assert torch.equal(ask(**stops), ask.plain(**stops))
    finally:
        target.generation_config.eos_token_id = before


def test_stop_strings(ask, pair):
    target, draft, tok, prompts = pair
    text = tok.decode(ask.plain()[0, len(prompts[0]) :])
    word = text.split()[3]
    expected = ask.plain(stop_strings=word, tokenizer=tok)
    assert expected.shape < ask.plain().shape
    assert torch.equal(ask(stop_strings=word, tokenizer=tok, drafter=draft), expected)
    assert torch.equal(ask(stop_strings=[word, "zzz"], tokenizer=tok), expected)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        ask(stop_strings=word)


def test_a_streamer_gets_what_plain_decoding_gives_it(ask, batch, pair):
    ids, mask = batch
    end = ask.plain(ids, **mask)[0, ids.shape[1] + 5].item()
    plain, ours = Recorder(), Recorder()
    ask.plain(ids, **mask, eos_token_id=end, streamer=plain)
    ask(ids, **mask, eos_token_id=end, streamer=ours, drafter=pair[1])
    assert ours.given == plain.given
    assert ours.ends == plain.ends == 1


def test_a_streamer_that_another_thread_reads(ask, pair):
    target, draft, tok, prompts = pair
    streamer = TextIteratorStreamer(tok, skip_prompt=True, timeout=60)
    thread = Thread(target=ask, kwargs={"streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tok.decode(ask.plain()[0, len(prompts[0]) :])


def test_called_directly(pair):
    """Without `generate` around it, arguments are what they are."""
    target, draft, tok, prompts = pair
    config, streamer = GenerationConfig(max_length=20), Recorder()
    criteria = [MaxLengthCriteria(20)]
    ids = torch.tensor([prompts[0]])
    found = outrider.custom_generate(target, ids, [], criteria, config, streamer=streamer)
    assert len(streamer.given) == 20 - len(prompts[0])
    assert found.shape == (1, 20)
    with pytest.raises(outrider.Unsupported, match="inputs_embeds=Tensor"):
        outrider.custom_generate(target, ids, [], criteria, config, inputs_embeds=ids)
