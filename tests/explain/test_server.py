"""A walk of a server: what a real SGLang server with Outrider said, said again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from recordings import PROMPT

from outrider.errors import Unsupported, UsageError
from outrider.explain.recording import ExplainOptions
from outrider.explain.server import record
from outrider.explain.walk import make_walk

# the tiny pair in SGLang 0.5.11: adaptive, 60 tokens, temperature 0.9, seed 3
REPLY = json.loads((Path(__file__).parent / "sglang_reply.json").read_text())
INFO = {
    "model_path": "/somewhere/target",
    "tokenizer_path": "/somewhere/target",
    "speculative_algorithm": "OUTRIDER",
    "speculative_draft_model_path": "/somewhere/draft",
    "speculative_num_steps": 8,
    "version": "0.5.11",
}


class Sglang(ThreadingHTTPServer):
    """Answers as SGLang does. `replies`: what each path answers; a number is an error."""

    daemon_threads = True

    def __init__(self, tokenizer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.tokenizer = tokenizer
        self.asked: list[tuple[str, dict]] = []
        self.replies: dict[str, object] = {"/server_info": INFO, "/generate": [REPLY]}
        self.aborted = threading.Event()
        self.waits = False


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({})

    def do_POST(self):
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body):
        server = self.server
        server.asked.append((self.path, body))
        reply = server.replies.get(self.path, 404)
        if self.path == "/tokenize":
            ids = server.tokenizer.encode(body["prompt"])
            reply = {"tokens": ids, "count": len(ids)}
        elif self.path == "/detokenize":
            reply = {"text": [server.tokenizer.decode(ids) for ids in body["tokens"]]}
        elif self.path == "/abort_request":
            server.aborted.set()
            reply = {}
        status, reply = (reply, {"error": {"message": "no"}}) if reply == 404 else (200, reply)
        if isinstance(reply, tuple):
            status, reply = reply
        self.send_response(status)
        self.end_headers()
        if self.path != "/generate" or status != 200:
            self.wfile.write(reply if isinstance(reply, bytes) else json.dumps(reply).encode())
            return
        for number, piece in enumerate(reply):
            if number and server.waits:
                server.aborted.wait(20)
            self.wfile.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *args):
        pass


@pytest.fixture
def sglang(tokenizer):
    server = Sglang(tokenizer("tiny-target"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ask(server, **more):
    return record(ExplainOptions(PROMPT, **more), server.url, lambda _: None)


def test_walk_of_a_server(sglang):
    found, decode = ask(sglang, temperature=0.9, seed=3, drafter="adaptive", max_tokens=60)
    walk = make_walk(found, decode, {})
    assert walk.output_ids == REPLY["output_ids"]
    assert walk.text == REPLY["text"]
    assert walk.finish_reason == "length"
    steps = REPLY["meta_info"]["outrider_steps"]
    assert [one.accepted for one in walk.steps[1:]] == [len(one["kept"]) for one in steps]
    assert any(one.branches for one in walk.steps)
    assert walk.settings["target"] == "target"
    assert walk.settings["max_drafts"] == 8
    for step in walk.steps:
        for token in step.emitted:
            assert 0 < token.probability <= 1
            assert len(token.alternatives) == 3


def test_what_is_asked(sglang):
    ask(sglang, temperature=0.9, seed=3, drafter="adaptive", max_drafts=4, max_tokens=60)
    asked = dict(sglang.asked)["/generate"]
    params = asked["sampling_params"]
    assert params["custom_params"]["outrider"] == {
        "explain": True,
        "drafter": "adaptive",
        "max_drafts": 4,
    }
    assert (params["temperature"], params["sampling_seed"]) == (0.9, 3)
    assert params["max_new_tokens"] == 60
    assert asked["input_ids"] == sglang.tokenizer.encode(PROMPT)


def test_a_single_token_has_no_steps(sglang):
    meta = {"finish_reason": {"type": "length"}}
    sglang.replies["/generate"] = [{"output_ids": [337], "meta_info": meta}]
    walk = make_walk(*ask(sglang, max_tokens=1), {})
    assert walk.verdict == "1 token in 1 pass of the target"


@pytest.fixture
def heeds_interrupts():
    """A shell's background jobs, tests among them, are born deaf to Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_interrupts")
def test_interrupted_walks_end_with_what_there_is(sglang):
    """Ctrl-C asks the server to end the request, and hears it out."""
    early = {"output_ids": REPLY["output_ids"][:1], "meta_info": {"completion_tokens": 1}}
    sglang.replies["/generate"] = [early, REPLY]
    sglang.waits = True

    def interrupt(count):
        if not sglang.aborted.is_set():
            assert count == 1
            signal.raise_signal(signal.SIGINT)

    found, decode = record(ExplainOptions(PROMPT), sglang.url, interrupt)
    paths = [path for path, _ in sglang.asked]
    assert paths[-2:] == ["/generate", "/abort_request"]
    assert sglang.asked[-1][1]["rid"] == sglang.asked[-2][1]["rid"]
    walk = make_walk(found, decode, {})
    assert walk.finish_reason == "interrupted"
    assert walk.output_ids == REPLY["output_ids"]


@pytest.mark.usefixtures("heeds_interrupts")
def test_a_second_interrupt_leaves(sglang):
    sglang.replies["/generate"] = [REPLY, REPLY]

    def interrupt(count):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        record(ExplainOptions(PROMPT), sglang.url, interrupt)


def without(**changes):
    reply = {**REPLY, "meta_info": dict(REPLY["meta_info"])}
    reply["meta_info"].update(changes)
    return {k: v for k, v in reply.items() if v is not None}


@pytest.mark.parametrize(
    ("path", "reply", "says"),
    [
        ("/server_info", 404, "has no /server_info; give the URL of an SGLang"),
        ("/server_info", b"<html>", "cannot be read .Invalid JSON"),
        ("/server_info", ["vLLM"], "cannot be read .*; give the URL of an SGLang server"),
        ("/generate", [{**REPLY, "output_ids": [5] * 101}], "101 tokens where 100 were asked for"),
        ("/generate", [without(output_token_logprobs=[[1000, 5, None]])], "cannot be read"),
        ("/server_info", (401, {}), "set OPENAI_API_KEY"),
        (
            "/server_info",
            {**INFO, "speculative_algorithm": None},
            "serves target without Outrider; start it with `outrider serve`",
        ),
        ("/generate", (400, {"error": {"message": "no such drafter"}}), "no such drafter"),
        ("/generate", [{"error": {"message": "out of memory"}}], "out of memory"),
        ("/generate", [], "says nothing"),
        (
            "/generate",
            [{"output_ids": [1, 2], "meta_info": {}}],
            "tells no steps; give it an Outrider as new",
        ),
        ("/generate", [without(outrider_steps=[{"drafts": "?"}])], "the same version"),
    ],
)
def test_errors_say_what_to_do(sglang, path, reply, says):
    sglang.replies[path] = reply
    with pytest.raises(Unsupported, match=says):
        ask(sglang)


def test_nobody_there(sglang):
    with pytest.raises(Unsupported, match=r"no server answers .*; start one"):
        record(ExplainOptions(PROMPT), "http://127.0.0.1:9", lambda _: None)
    with pytest.raises(Unsupported, match="write it as http"):
        record(ExplainOptions(PROMPT), "localhost:30000", lambda _: None)


def test_another_model(sglang):
    with pytest.raises(Unsupported, match="serves target, not elsewhere"):
        ask(sglang, target="models/elsewhere")
    ask(sglang, target="models/target")


def test_chat_needs_the_template(sglang, model_dir):
    with pytest.raises(Unsupported, match="no chat template; leave out --chat"):
        ask(sglang, chat=True, target=str(model_dir("tiny-target")))
    with pytest.raises(Unsupported, match="no tokenizer at"):
        ask(sglang, chat=True, target="/not/here/target")


def test_a_server_does_not_choose_which_files_are_opened(sglang, model_dir, monkeypatch):
    """Its tokenizer_path was loaded, and its chat template was run."""
    monkeypatch.setattr("outrider.explain.server.load_tokenizer", lambda _: pytest.fail("loaded"))
    sglang.replies["/server_info"] = {**INFO, "tokenizer_path": str(model_dir("tiny-target"))}
    with pytest.raises(UsageError, match="name its folder: --target"):
        ask(sglang, chat=True)


def test_the_key_is_sent(sglang, monkeypatch):
    seen = []
    monkeypatch.setattr(
        Handler, "log_request", lambda self, *_: seen.append(self.headers.get("Authorization"))
    )
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    ask(sglang)
    assert set(seen) == {"Bearer secret"}


def test_twin_a_server_that_began_anew_is_refused(sglang):
    """After a retraction SGLang reads the prompt again: a token that is in no step."""
    reply = {**REPLY, "output_ids": [*REPLY["output_ids"][:9], 5, *REPLY["output_ids"][9:]]}
    sglang.replies["/generate"] = [reply]
    with pytest.raises(ValueError, match="not the 61 of the output"):
        make_walk(*ask(sglang), {})


def test_the_base_install_is_enough():
    """Asking a server, and showing what it says, needs neither torch nor Transformers."""
    modules = ", ".join(
        f"outrider.explain.{name}" for name in ("run", "server", "page", "terminal")
    )
    check = f"import {modules}, sys; print({{'torch', 'transformers', 'httpx'}} & {{*sys.modules}})"
    found = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "set()"
