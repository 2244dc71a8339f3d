"""Requests to a real SGLang server with OUTRIDER: a hostile one costs itself only.

Names come from the SGLang that is installed, so that a new parameter cannot be forgotten. Bodies
are written as text: JSON has numbers and duplicate keys that Python would not write.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st
from strategies import NUMBERS, dumps, nested, texts, values, written
from watch import WAIT_SECONDS, Watch

pytestmark = pytest.mark.sglang

TINY = Path(__file__).parents[2] / "src" / "outrider" / "assets" / "tiny"
TEXT = "Once upon a time there was a little dog. The little dog"
FLAGS = [
    *("--dtype", "float32", "--mem-fraction-static", "0.1", "--attention-backend", "outrider"),
    *("--max-total-tokens", "8192", "--max-running-requests", "8", "--enable-metrics"),
    *("--speculative-algorithm", "OUTRIDER"),
]
MODES = {"default": [], "deterministic": ["--enable-deterministic-inference"]}
PROFILE = {"drafter": "suffix", "drafters": {"suffix": {"shared_tokens": 4096}}}
OPTIONS = {"max_drafts": 3, "drafter": "ngram", "explain": False}
MOST_WORK = 10
"""Tokens of an answer, and answers: more of them are work that the server may be asked for."""

WORK = ("n", "best_of", "beam_width", "max_new_tokens", "min_new_tokens", "max_tokens",
        "max_completion_tokens", "min_tokens")  # fmt: skip


class Door:
    """A server that is asked, and started again if it has died: inputs are shrunk after that."""

    def __init__(self, start) -> None:
        self._start, self.server = start, None
        self.expected = None

    def post(self, path: str, body: str) -> requests.Response:
        if self.server is None:
            with Watch.current.pause() if Watch.current else nullcontext():
                self.server = self._start().wait()
                self.expected = self.known()
        try:
            return requests.post(
                self.server.url + path,
                data=body.encode("utf-8", "surrogatepass"),
                headers={"Content-Type": "application/json", "Connection": "close"},
                timeout=WAIT_SECONDS,
            )
        except (requests.RequestException, AssertionError):
            self.close()
            raise

    def known(self):
        """Return the answer to a request that has nothing hostile."""
        params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        answer = self.post("/generate", json.dumps({"text": TEXT, "sampling_params": params}))
        assert answer.status_code == 200, answer.text[:300]
        return answer.json()["output_ids"]

    def check(self, path: str, body: str) -> None:
        """Ask, and see that the server goes on as before."""
        answer = self.post(path, body)
        assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text[:300]
        try:
            assert self.known() == self.expected
        except AssertionError:
            self.close()
            raise

    def close(self) -> None:
        if self.server is not None:
            sys.stderr.write(self.server.tail())
            self.server.stop()
            self.server = None


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """What the servers are forked from."""
    from forkserver import ForkServers

    servers = ForkServers(tmp_path_factory.mktemp("forks"))
    yield servers
    servers.close()


@pytest.fixture(scope="module", params=MODES)
def door(request, forks, tmp_path_factory):
    from server import Server

    folder = tmp_path_factory.mktemp(request.param)
    profile = folder / "profile.yaml"
    profile.write_text(json.dumps(PROFILE))
    flags = [*FLAGS, *MODES[request.param]]

    def start():
        random.seed(os.urandom(8))  # Hypothesis has seeded it, and ports are chosen by it
        log, environment = folder / "server.log", {"OUTRIDER_CONFIG": str(profile)}
        return Server(TINY / "target", *flags, log=log, forks=forks, **environment)

    door = Door(start)
    names("sampling")  # imports are not timed
    door.post("/generate", "{}")
    yield door
    if door.server is not None:
        door.server.settle_down()
    door.close()


@cache
def names(of):
    """Return the names that the installed SGLang takes."""
    from sglang.srt.entrypoints.openai import protocol
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    if of == "sampling":
        return sorted({*inspect.signature(SamplingParams).parameters} - {"self"})
    if of == "generate":
        return sorted(GenerateReqInput.__dataclass_fields__)
    return sorted(getattr(protocol, of).model_fields)


LITERALS = ("1e999", "-1e999", "NaN", '"\\ud800"', "9" * 5000, "-0", "1e-400", "[[[]]]", '""')
CLOSE = (0, 1, 2, -1, -2, 0.5, 1.0, 2.5, True, "", "a", [], {}, [0], [None], ["a"], [[1]], {"a": 1})
"""Values that are nearly right for one parameter or another."""

RAW = (
    st.sampled_from(LITERALS)
    | st.sampled_from((*CLOSE, *NUMBERS)).map(dumps)
    | values().map(dumps)
    | texts().map(dumps)
    | nested()
)
PATTERNS = (
    *("(a+)+$", "(.*)*x", "(", "[", "a{1,99999}", "(?P<a>b)(?P=a)", "{" * 5000, "(" * 5000),
    *("\0", r"(?:\b){4000000000}", '"]"' * 600 + '"["' * 600),
)


def members(names, usual):
    """JSON objects of usual members and hostile ones; a name may come twice."""

    def joined(hostile):
        pairs = [*((name, dumps(value)) for name, value in usual.items()), *hostile]
        return "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in pairs) + "}"

    hostile = st.tuples(st.sampled_from(names), RAW | st.sampled_from(PATTERNS).map(dumps))
    return st.lists(hostile, min_size=1, max_size=4).filter(affordable).map(joined)


def affordable(hostile):
    """Leave out requests for much honest work."""
    for name, raw in hostile:
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            continue
        if name in WORK and isinstance(value, int) and MOST_WORK < value <= 10**5:
            return False
    return True


def sampling():
    usual = {"max_new_tokens": 8}
    options = written(OPTIONS).map(lambda text: f'{{"outrider": {text}}}')
    plain = members(names("sampling"), usual)
    ours = options.map(lambda raw: f'{{"max_new_tokens": 8, "custom_params": {raw}}}')
    return plain | plain | ours | st.lists(RIGHT, min_size=2, max_size=4).map(together)


RIGHT = st.sampled_from((
    {"regex": "a"}, {"json_schema": '{"type": "object"}'}, {"min_new_tokens": 5},
    {"stop_token_ids": [*range(512)]}, {"logit_bias": {str(token): -1e9 for token in range(512)}},
    {"temperature": 1e-6}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 1e-6}, {"top_k": 1},
    {"repetition_penalty": 1e-9}, {"presence_penalty": 1e9}, {"logit_bias": {"5": 1e9}},
))  # fmt: skip
"""Parameters that are served, each alone."""


def together(params):
    return json.dumps({"max_new_tokens": 8} | {k: v for one in params for k, v in one.items()})


@st.composite
def calls(draw):
    """Bodies of /generate: hostile sampling parameters, fields, or both; one prompt or two."""
    prompt = draw(st.sampled_from((TEXT, TEXT, [TEXT, "a"], [TEXT], "")))
    params = draw(sampling() | st.just('{"max_new_tokens": 8}'))
    usual = {"text": prompt, "return_logprob": draw(st.booleans())}
    if draw(st.booleans()):
        usual.pop("text")
        usual["input_ids"] = draw(st.sampled_from(([1, 2, 3], [[1, 2], [3]], [-1], [10**6], [])))
    body = draw(members(names("generate"), usual) | st.just(dumps(usual)))
    return f'{body[:-1]}, "sampling_params": {params}}}'


@st.composite
def openai_calls(draw, of, usual):
    """Bodies of OpenAI's API, with the fields that SGLang adds to it."""
    return draw(members(names(of), usual))


@given(calls() | calls() | written({"text": TEXT}))
def test_generate(door, body):
    door.check("/generate", body)


@given(openai_calls("CompletionRequest", {"model": "m", "prompt": TEXT, "max_tokens": 8}))
def test_completions(door, body):
    door.check("/v1/completions", body)


SAID = [{"role": "user", "content": TEXT}]


@given(openai_calls("ChatCompletionRequest", {"model": "m", "messages": SAID, "max_tokens": 8}))
def test_chat(door, body):
    door.check("/v1/chat/completions", body)
