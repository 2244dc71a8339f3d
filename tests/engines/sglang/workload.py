"""Requests of every kind, and what of their answers must be equal."""

from __future__ import annotations

import random
from dataclasses import dataclass

OPENINGS = [
    "Once upon a time there was a little girl named Lily. Lily had a cat. Lily",
    "The dog ran to the park. The dog ran to the tree. The dog",
    "One day, Tom and Sam went to the beach. Tom said",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "The sun was hot. The sun was bright. The sun",
]
SHARED = "There was a big house by the lake. In the house lived a cat, a dog and a bird. "
"""Many prompts begin with this: the radix cache is used."""

JSON_SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, '
    '"age": {"type": "integer", "maximum": 99, "minimum": 1}}, "required": ["name", "age"]}'
)


def ids_of(period: int) -> dict[str, dict]:
    """Return the kinds that name tokens. period: the token of a full stop"""
    return {
        "logit_bias": {"logit_bias": {str(period): 3.0, "13": -2.0, "30": 4.0}},
        "min_new_tokens": {"min_new_tokens": 8, "stop_token_ids": [period, 30]},
        "stop ids": {"stop_token_ids": [period, 13, 30]},
    }


# sampling parameters by kind
GREEDY = {
    "greedy": {},
    "ignore_eos": {"ignore_eos": True},
    "repetition": {"repetition_penalty": 1.3},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": 0.9},
    # SGLang keeps its penalties in a set: their order, and with it the last bits, changes from
    # process to process. Repetition beside the others would change whole answers.
    "additive penalties": {
        "frequency_penalty": 0.4,
        "presence_penalty": 0.4,
        "min_new_tokens": 6,
    },
    **ids_of(period=29889),
    "stop strings": {"stop": [". The", "\n", " and", "8"]},
    "stop regex": {"stop_regex": "[A-Z][a-z]+ said"},
    "kept stop string": {"stop": ["was", "to"], "no_stop_trim": True},
    "one token": {"max_new_tokens": 1},
    "two tokens": {"max_new_tokens": 2},
}
PERIOD = {"stories260k": 426}
"""The token of a full stop, where it is not that of Llama 2."""


def greedy(model: str) -> dict[str, dict]:
    """Return the greedy kinds; tokens that they name are those of this model."""
    return GREEDY | ids_of(PERIOD[model]) if model in PERIOD else GREEDY


SEEDED = {
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 1.7},
    "temperature, penalties": {"temperature": 0.9, "repetition_penalty": 1.2},
}
FILTERED = {
    "top_k": {"temperature": 0.9, "top_k": 8},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "top_k, top_p": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "frequency_penalty": 0.3},
}
GRAMMAR = {
    "json_schema": {"json_schema": JSON_SCHEMA, "max_new_tokens": 48},
    "regex": {"regex": "(The|A) (dog|cat) (ran|sat)( and (ran|sat)){2,5}\\."},
    "ebnf": {"ebnf": 'root ::= ("yes" | "no") (", " ("yes" | "no")){3,9} "."'},
    "json_schema, sampled": {"json_schema": JSON_SCHEMA, "temperature": 0.9},
}
# what beside the sampling parameters a request may ask for
FORMS = ["plain", "plain", "logprobs", "stream", "n", "chat", "completions", "processor"]


@dataclass(frozen=True)
class Wish:
    """One request: where it goes, and what it says. `kind` names its sampling parameters."""

    kind: str
    form: str
    path: str
    body: dict

    @property
    def wish(self) -> tuple[str, dict]:
        return self.path, self.body


def prompt(rng: random.Random) -> str:
    text = rng.choice(OPENINGS)
    if rng.random() < 0.4:
        text = SHARED + text
    if rng.random() < 0.3:
        text += f" number {rng.randrange(10)}"
    return text


def make(kinds: dict[str, dict], count: int, seed: int, max_new: int, processor: str) -> list[Wish]:
    """Return `count` requests, each kind and each form as often as the others."""
    rng = random.Random(seed)
    names = list(kinds)
    wishes = []
    for i in range(count):
        kind = names[i % len(names)]
        form = FORMS[(i // len(names)) % len(FORMS)]
        params = {"temperature": 0, "max_new_tokens": rng.randrange(max_new // 2, max_new)}
        params |= {"sampling_seed": rng.randrange(2**31), **kinds[kind]}
        least = params.get("min_new_tokens", 0)  # SGLang refuses more than there may be
        params["max_new_tokens"] = max(params["max_new_tokens"], least)
        wishes.append(_wish(kind, form, params, prompt(rng), processor))
    return wishes


def _wish(kind: str, form: str, params: dict, text: str, processor: str) -> Wish:
    body: dict = {"text": text, "sampling_params": params}
    if form == "logprobs":
        body |= {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0}
        body["token_ids_logprob"] = [1, 13, 29]
    elif form == "stream":
        body["stream"] = True
    elif form == "n":
        params["n"] = 2
    elif form == "processor" and "json_schema" not in params:
        body["custom_logit_processor"] = processor
        params["custom_params"] = {"window": 5}
    elif form in ("chat", "completions"):
        openai = {k: v for k, v in params.items() if k not in ("max_new_tokens", "sampling_seed")}
        openai |= {"model": "default", "max_tokens": params["max_new_tokens"]}
        openai["seed"] = params["sampling_seed"]
        if "min_new_tokens" in openai:
            openai["min_tokens"] = openai.pop("min_new_tokens")
        if "json_schema" in openai:
            import json

            schema = {"name": "answer", "schema": json.loads(openai.pop("json_schema"))}
            openai["response_format"] = {"type": "json_schema", "json_schema": schema}
        if form == "completions":
            return Wish(kind, form, "/v1/completions", {**openai, "prompt": text, "logprobs": 2})
        openai |= {"stream": True, "stream_options": {"include_usage": True}}
        openai["messages"] = [{"role": "user", "content": text}]
        return Wish(kind, form, "/v1/chat/completions", openai)
    return Wish(kind, form, "/generate", body)


def essence(answer) -> dict | list:
    """Return what must be equal: ids, text, end, counts; and the logprobs apart."""
    if isinstance(answer, list):
        return [essence(one) for one in answer]
    if "choices" in answer:
        choices = [
            {k: c.get(k) for k in ("text", "finish_reason", "matched_stop", "message")}
            for c in answer["choices"]
        ]
        usage = {k: v for k, v in (answer["usage"] or {}).items() if k.endswith("_tokens")}
        return {"choices": choices, "usage": usage}
    meta = answer["meta_info"]
    found = {k: meta[k] for k in ("finish_reason", "prompt_tokens", "completion_tokens")}
    return {"ids": answer.get("output_ids"), "text": answer["text"], **found}


def logprobs(answer) -> list:
    """Return all logprobs in one nested list of (value, id)."""
    if isinstance(answer, list):
        return [logprobs(one) for one in answer]
    if "choices" in answer:
        return [c.get("logprobs") for c in answer["choices"]]
    meta = answer["meta_info"]
    names = [f"{i}_{n}_logprobs" for i in ("input", "output") for n in ("token", "top")]
    names += ["input_token_ids_logprobs", "output_token_ids_logprobs"]
    return [meta.get(name) for name in names]


def furthest(a, b) -> float:
    """Return the largest difference between the numbers of two nested values of equal shape.

    Of numbers beyond 1, relative to the number: a logprob of -20 has that many digits less.
    """
    if isinstance(a, dict) and isinstance(b, dict):
        a, b = [a[k] for k in sorted(a)], [b[k] for k in sorted(b)]
    if isinstance(a, list) and isinstance(b, list):
        assert len(a) == len(b), (a, b)
        return max((furthest(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return 0.0 if a == b else abs(a - b) / max(1.0, abs(a))
    assert a == b, (a, b)
    return 0.0
