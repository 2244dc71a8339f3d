"""Turns that follow each other: what one turn leaves in a cache must not change the next one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from server import Server

Options = dict | None
"""Outrider's options of a request; None if it is not asked."""

Texts = Sequence[Sequence[int]]

PLAIN = {"max_drafts": 0}

TEXTS = (
    "On a misty morning, an outrider rode out of Harrow. The road was long. The road was",
    "Mira and Tom went to the mill. Mira said hello. Tom said hello. Mira said",
    "The rider came to the bridge. The rider came to the river. The rider came to the",
    "In the village of Harrow there was a horse. The horse was tired. The horse was",
)
SHARED = "There was a big house by the lake. In the house lived a cat, a dog and a bird. "
"""Two users' prompts begin with this."""


@dataclass(frozen=True)
class Turn:
    """A turn of a conversation: all tokens before its answer, its length, and the answer."""

    context: Sequence[int]
    most: int
    answer: Sequence[int]


def body(tokens: Sequence[int], most: int, options: Options) -> dict:
    """Return a greedy request for so many tokens after these."""
    params: dict = {"temperature": 0, "max_new_tokens": most, "ignore_eos": True}
    if options is not None:
        params["custom_params"] = {"outrider": options}
    return {"input_ids": list(tokens), "sampling_params": params}


def generate(
    server: Server, tokens: Sequence[int], most: int, options: Options, **more: object
) -> dict:
    """Return the answer to such a request."""
    return server.ask("/generate", body(tokens, most, options) | more)


def tokens_of(server: Server, text: str, count: int) -> list[int]:
    """Return a text that the target itself has written: drafts of it are accepted."""
    prompt = server.ask("/v1/tokenize", {"prompt": text, "model": "default"})["tokens"]
    return [*prompt, *generate(server, prompt, count, None)["output_ids"]]


def converse(server: Server, texts: Texts, seed: int, options: Options) -> list:
    """Return the turns of one conversation, each on the whole text so far; A is asked again."""
    rng, turns = random.Random(seed), []
    text = list(rng.choice(texts))
    context = text[: rng.randrange(20, min(60, len(text)))]
    first = list(context)
    for _ in range(3):
        turns.append(ask_turn(server, context, rng.randrange(8, 24), options))
        context = [*context, *turns[-1].answer, *rng.sample(range(20, 256), 3)]
    return [*turns, ask_turn(server, first, turns[0].most, options)]


def ask_turn(server: Server, context: Sequence[int], most: int, options: Options) -> Turn:
    """Ask one turn, and note its answer."""
    return Turn(list(context), most, generate(server, context, most, options)["output_ids"])


def in_company(server: Server, texts: Texts, seeds: Sequence[int], options: Options):
    """Return the turns of many conversations at once."""
    with ThreadPoolExecutor(len(seeds)) as pool:
        found = pool.map(lambda seed: converse(server, texts, seed, options), seeds)
        return [turn for turns in found for turn in turns]


def session(
    server: Server, texts: Texts, seed: int, options: Options, streaming: bool = False
) -> list[Turn]:
    """Return the turns of one session of SGLang's: each turn sends its new tokens only."""
    rng, context, turns, last = random.Random(seed), [], [], None
    opened = server.post("/open_session", {"capacity_of_str_len": 4000, "streaming": streaming})
    for _ in range(4):
        text = rng.choice(texts)
        start = rng.randrange(len(text) - 40)
        new = list(text[start : start + rng.choice([3, 20, 40])])
        where = {"id": opened.json()}
        if last is not None and not streaming:
            where["rid"] = last
        most = rng.choice([4, 9, 17, 30])
        found = generate(server, new, most, options, session_params=where)
        last, context = found["meta_info"]["id"], [*context, *new]
        turns.append(Turn(context, most, found["output_ids"]))
        context = [*context, *found["output_ids"]]
    server.post("/close_session", {"session_id": opened.json()})
    return turns


def wrong_turns(server: Server, turns: Sequence[Turn]) -> list[Turn]:
    """Return the turns whose answers plain decoding does not give from an empty cache."""
    wrong = []
    for turn in turns:
        server.settle_down()  # flushes the cache
        cold = generate(server, turn.context, turn.most, PLAIN)
        if cold["output_ids"] != turn.answer:
            wrong.append(turn)
    return wrong
