"""Engines answer: in this process, and over HTTP with OpenAI's two shapes of replies."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from outrider.clients import Counts, Query, draft_kind, open_engine
from outrider.clients.counters import parse_metrics
from outrider.errors import Unsupported, UsageError

WORDS = ["one", " two", " three"]
METRICS = """# HELP outrider:verify_steps_total Verify passes.
outrider:verify_steps_total{model_name="m"} 10.0
outrider:verify_rows_total{model_name="m"} 50.0
outrider:emitted_tokens_total{model_name="m"} 40.0
outrider:draft_tokens_total{drafter="suffix",model_name="m"} 20.0
outrider:draft_tokens_total{drafter="model",model_name="m"} 10.0
outrider:accepted_draft_tokens_total{drafter="model",model_name="m"} 20.0
outrider:accepted_at_total{model_name="m",position="1"} 15.0
outrider:step_seconds_total{model_name="m",part="forward"} 0.5
"""


class Fake(BaseHTTPRequestHandler):
    """A server that counts: enough of OpenAI's API to see what is sent and how replies are read."""

    bodies: ClassVar[list[dict]] = []
    key: ClassVar[str | None] = None

    def log_message(self, *args):
        pass

    def do_GET(self):
        if self._locked:
            return self._send({"error": "no"}, 401)
        if self.path == "/v1/models":
            return self._send({"object": "list", "data": [{"id": "m", "object": "model"}]})
        if self.path == "/metrics":
            return self._send(METRICS.encode())
        return self._send({"error": "no"}, 404)

    @property
    def _locked(self):
        return self.key is not None and self.headers["Authorization"] != f"Bearer {self.key}"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if self._locked:
            return self._send({"error": "no"}, 401)
        chat = self.path.endswith("/chat/completions")
        if body["max_tokens"] == 13:
            return self._send({"error": {"message": "thirteen is refused"}}, 400)
        if body.get("stream"):
            return self._stream(chat)
        text = "".join(WORDS)
        choice = {"index": 0, "finish_reason": "length"}
        if chat:
            choice["message"] = {"role": "assistant", "content": text}
            content = [
                {
                    "token": w,
                    "logprob": -0.1,
                    "bytes": None,
                    "top_logprobs": [
                        {"token": w, "logprob": -0.1, "bytes": None},
                        {"token": "x", "logprob": -2.5, "bytes": None},
                    ],
                }
                for w in WORDS
            ]
            choice["logprobs"] = {"content": content} if body.get("logprobs") else None
        else:
            choice["text"] = text
            tops = [{"x": -2.5, w: -0.1} for w in WORDS]
            choice["logprobs"] = {
                "tokens": WORDS,
                "token_logprobs": [-0.1] * 3,
                "top_logprobs": tops,
                "text_offset": [0, 3, 7],
            }
        usage = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
        return self._send({"id": "1", "choices": [choice], "usage": usage})

    def _stream(self, chat):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for word in WORDS:
            part = {"delta": {"content": word}} if chat else {"text": word}
            piece = {"id": "1", "choices": [{"index": 0, "finish_reason": None, **part}]}
            self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
        usage = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
        self.wfile.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, what, status=200):
        data = what if isinstance(what, bytes) else json.dumps(what).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def url():
    Fake.bodies.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_reply_is_read_in_every_shape(url, chat, stream):
    engine = open_engine(url)
    logprobs = None if stream else 2
    heard = []
    queries = [Query(f"number {n}", chat=chat, logprobs=logprobs, seed=n) for n in range(4)]
    answers = engine.ask(queries, 2, stream=stream, heard=lambda n, a: heard.append(n))
    assert sorted(heard) == [0, 1, 2, 3]
    for answer in answers:
        assert (answer.text, answer.count) == ("one two three", 3)
        assert answer.arrivals[-1][1] == pytest.approx(3)
        if not stream:
            assert [token.text for token in answer.tokens] == WORDS
            assert answer.tokens[0].top == (("one", -0.1), ("x", -2.5))
    assert {body["seed"] for body in Fake.bodies} == {0, 1, 2, 3}


def test_wishes_for_outrider_and_any_field_reach_the_body(url):
    open_engine(f"{url}#drafter=suffix,max_drafts=3").ask([Query("a")])
    assert Fake.bodies[-1]["custom_params"] == {"outrider": {"drafter": "suffix", "max_drafts": 3}}
    assert Fake.bodies[-1]["cache_salt"] == "outrider drafter=suffix,max_drafts=3"
    other = open_engine(url).variant({"max_drafts": 0}, salt="all")
    other.ask([Query("a")])
    assert Fake.bodies[-1]["custom_params"] == {"outrider": {"max_drafts": 0}}
    assert Fake.bodies[-1]["cache_salt"] == "outrider all"
    assert other.spec == f"{url}#max_drafts=0"
    open_engine(f'{url}/v1#{{"cache_prompt": false}}').ask([Query("a")])
    assert Fake.bodies[-1]["cache_prompt"] is False
    assert "custom_params" not in Fake.bodies[-1]


def test_counters_are_read(url):
    counts = open_engine(url).counts()
    assert counts.request_steps == 20  # 50 rows, 30 of them drafts
    assert counts.tokens_per_step == 2
    assert counts.step_seconds == 0.05
    assert (counts - counts).emitted == 0
    assert counts.as_json()["by_drafter"] == {"model": 10, "suffix": 20}
    name = "outrider:verify_steps_total"
    samples = parse_metrics(f'{name}{{x="1",y="q\\"}}"}} 2e3\n# no\nc 1\n{name} 1 1700000000')
    assert samples == [(name, {"x": "1", "y": 'q\\"}'}, 2000.0), (name, {}, 1.0)]


def test_a_server_may_want_a_key(url, monkeypatch):
    monkeypatch.setattr(Fake, "key", "secret")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(Unsupported, match="set OPENAI_API_KEY"):
        open_engine(url)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    engine = open_engine(url)
    assert engine.ask([Query("a", False, 3)])[0].count == 3
    assert engine.counts() is not None


def test_what_cannot_be_asked_says_what_to_do(url):
    with pytest.raises(Unsupported, match="no server answers at"):
        open_engine("http://127.0.0.1:9")
    with pytest.raises(Unsupported, match="choose one of m"):
        open_engine(f"{url}#model=other")
    with pytest.raises(Unsupported, match="thirteen is refused"):
        open_engine(url).ask([Query("a", max_tokens=13)])
    with pytest.raises(Unsupported, match="OpenAI-compatible"):
        open_engine(f"{url}/wrong")
    for spec in ("localhost:30000", "transformers:", "sglang:x", f"{url}#drafter", f"{url}#{{"):
        with pytest.raises(Unsupported):
            open_engine(spec)


MODES = ["", "#mode=assisted,draft={draft}", "#mode=lookup", "#draft={draft}", "#drafter=suffix"]
MODES += ["#draft={draft},drafter=adaptive", "#draft={head}", "#draft={head},drafter=adaptive"]


def test_a_head_is_told_from_a_model(model_dir):
    target = model_dir("tiny-target")
    kinds = {"head": "eagle3", "mtp": "mtp", "draft": "model", "nothing": "model"}
    assert {name: draft_kind(str(target.parent / name)) for name in kinds} == kinds
    for option in ("mode=assisted", "draft_bits=8"):
        with pytest.raises(UsageError, match="with the eagle3 head"):
            open_engine(f"transformers:{target}#draft={target.parent / 'head'},{option}")


def test_all_modes_of_transformers_say_the_same(model_dir):
    target, draft = model_dir("tiny-target"), model_dir("tiny-draft")
    prompts = ["On a misty morning, an outrider rode out", "At the bridge the toll-keeper"]
    queries = [Query(text, chat=False, max_tokens=24, logprobs=2) for text in prompts]
    said = []
    for mode in MODES:
        mode = mode.format(draft=draft, head=target.parent / "head")
        engine = open_engine(f"transformers:{target}{mode}")
        answers = engine.ask(queries, 2)
        said.append([[token.text for token in a.tokens] for a in answers])
        assert all(len(a.tokens) == a.count == 24 for a in answers)
        assert all(t.logprob == pytest.approx(t.top[0][1]) for a in answers for t in a.tokens)
        counts = engine.counts()
        assert (counts is not None) == mode.startswith(("#draft", "#drafter"))
        if counts is not None:
            assert counts.emitted == 2 * 23  # the first token is the prefill's
            assert counts.request_steps == counts.rows - counts.drafted
    assert all(one == said[0] for one in said)
    other = engine.variant({"drafter": "none", "max_drafts": 0})
    again = other.ask(queries, 2)
    assert [[token.text for token in a.tokens] for a in again] == said[0]
    assert other.counts().drafted == 0 < engine.counts().emitted


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(Unsupported, match="no model at"):
        open_engine(f"transformers:{tmp_path}")
    with pytest.raises(Unsupported, match=r"no model at '.*/none' \(no such directory\)"):
        open_engine(f"transformers:{tmp_path}/none")
    with pytest.raises(Unsupported, match="choose one of"):
        open_engine(f"transformers:{tmp_path}#mode=fast")
    with pytest.raises(Unsupported, match="add draft="):
        open_engine(f"transformers:{tmp_path}#mode=assisted")
    with pytest.raises(Unsupported, match="choose from"):
        open_engine(f"transformers:{tmp_path}#k=3")


def test_twin_counts_that_forget_a_part_are_seen():
    a = Counts(steps=3, emitted=5)
    a.accepted_at[1] = 4
    assert (a + a - a).as_json() == a.as_json()
    assert (a + a).as_json() != a.as_json()


def test_adaptive_has_the_draft_model_and_keeps_what_it_learns(model_dir):
    spec = f"transformers:{model_dir('tiny-target')}#draft={model_dir('tiny-draft')},draft_bits=8"
    with_model = open_engine(spec)
    engine = with_model.variant({"drafter": "adaptive", "max_drafts": 6})
    assert engine._quantized is with_model._quantized  # one copy for all
    queries = [Query("At the bridge the toll-keeper", chat=False, max_tokens=24)]
    engine.ask(queries)
    assert engine._drafter.control.models["model"].cost.passes.seconds(1)
