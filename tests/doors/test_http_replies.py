"""What servers answer to the tools: bytes, headers, JSON, streams and counters.

A tool takes an answer, or refuses it in one line. It sends the key to no other server, and it waits
and holds no more than its limits say.
"""

from __future__ import annotations

import io
import json
import tracemalloc
from pathlib import Path
from time import monotonic, sleep, thread_time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_server import events, http, serving
from strategies import STEERS, damaged, encoded, refusal, texts, values, written

from outrider.clients import Answer, Counts, Query, base_url, open_engine, shown_url
from outrider.clients import server as engine_server
from outrider.clients.counters import counts_of, parse_metrics
from outrider.clients.http import Client, Limits
from outrider.clients.server import ServerEngine
from outrider.errors import Unsupported, UsageError

SHORT = Limits(seconds=1.0, size=2**16, total=2**18)
REPLY = json.loads((Path(__file__).parents[1] / "explain" / "sglang_reply.json").read_text())


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


@pytest.fixture(autouse=True)
def no_pages(request):
    if "server" in request.fixturenames:
        running = request.getfixturevalue("server")
        running.pages, running.heard = {}, []


# -- bytes

HEADERS = (
    *("Content-Length: 5", "Content-Length: -1", f"Content-Length: {'9' * 5000}"),
    *("Transfer-Encoding: chunked", "Content-Encoding: gzip", "Location: http://127.0.0.2/x"),
    *("A: " + "b" * 70_000, "no colon", "\x1b]0;x\x07: y", " folded", "Set-Cookie: a=b"),
)
BODIES = (
    *(b"", b"{}", b'{"a": NaN}', b"[" * 50_000, b"5\r\nhello\r\n0\r\n\r\n", b"-1\r\nx", b"-5\r\nx"),
    *(
        b"f" * 70_000,
        b"ffffffffffffffffffff\r\nx",
        b"5;" + b"x" * 70_000,
        b"\x00\xff",
        b"x" * 2**17,
    ),
)


@st.composite
def answers(draw):
    """Bytes that are nearly an answer."""
    status = draw(st.integers(-1, 1000) | st.sampled_from((100, 200, 204, 301, 304, 401, 503)))
    lines = draw(st.lists(st.sampled_from(HEADERS) | texts(), max_size=4))
    version = draw(st.sampled_from(("HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/9", "ICY", "")))
    head = "\r\n".join([f"{version} {status} {draw(texts())}", *lines, "", ""])
    body = draw(st.sampled_from(BODIES) | st.binary(max_size=50))
    whole = encoded(head) + body
    return draw(damaged(whole)) if draw(st.booleans()) else whole


@given(answers())
def test_any_bytes_are_an_answer_or_refused(server, content):
    server.pages[None] = content
    with refusal(Unsupported):
        response = Client(server.url).ask("/x", limits=SHORT)
        assert len(response.body) <= SHORT.size
        assert len(response.why) <= 300
    with refusal(Unsupported), Client(server.url).open("/x", {}, SHORT) as exchange:
        for line in iter(exchange.line, b""):
            assert len(line) <= SHORT.size


def drip(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"x")
        sleep(0.02)


def drip_headers(connection):
    while True:
        connection.sendall(b"H")
        sleep(0.02)


def drip_continues(connection):
    while True:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        sleep(0.02)


def silence(connection):
    sleep(20)


@pytest.mark.parametrize("slow", [drip, drip_headers, drip_continues, silence])
def test_a_call_ends_in_time(server, slow):
    """A time-out of each read never came while a byte dripped in now and then."""
    server.pages[None] = slow
    started = monotonic()
    with pytest.raises(Unsupported, match="timed out"):
        Client(server.url).ask("/x", limits=Limits(seconds=0.5))
    assert monotonic() - started < 8


def test_silence_may_have_a_limit_of_its_own(server):
    server.pages[None] = silence
    started = monotonic()
    limits = Limits(seconds=60, silence=0.3)
    with pytest.raises(Unsupported, match="timed out"):
        Client(server.url).ask("/x", limits=limits)
    assert monotonic() - started < 8


def flood(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"x" * 2**20)


def flood_of_lines(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"data: x\n" * 2**14)


def flood_of_headers(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"A: " + b"x" * 60_000 + b"\r\n")


@pytest.mark.parametrize("much", [flood, flood_of_lines, flood_of_headers])
def test_a_call_ends_in_memory(server, much):
    server.pages[None] = much
    client, limits = Client(server.url), Limits(seconds=60, size=2**17, total=2**18)
    tracemalloc.start()
    with pytest.raises(Unsupported, match=r"more than|too many|no server answers"):
        client.ask("/x", limits=limits)
    with (
        pytest.raises(Unsupported, match=r"more than|too many|no server answers"),
        client.open("/x", {}, limits) as exchange,
    ):
        for _ in iter(exchange.line, b""):
            pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 2**20


def test_an_answer_that_is_cut_off_is_none(server):
    server.pages[None] = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{}"
    with pytest.raises(Unsupported, match="cut off"):
        Client(server.url).ask("/x")


# -- where requests go


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(server, monkeypatch, status):
    """The key went along to whatever server was named."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with serving() as other:
        server.pages[None] = http(b"", status, f"Location: {other.url}/v1/models\r\n")
        for ask in (
            lambda: Client(server.url).ask("/x"),
            lambda: Client(server.url).ask("/x", {}),
            lambda: open_engine(server.url),
            lambda: doctor(server.url),
            lambda: explain(server.url),
        ):
            with pytest.raises(Unsupported, match="redirects"):
                ask()
        assert other.heard == []
    assert all("Bearer sk-secret" in head for head in server.heard)


def test_proxies_of_the_environment_are_not_asked(server, monkeypatch):
    server.pages[None] = http({})
    with serving() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        assert Client(server.url).ask("/x").status == 200
        assert proxy.heard == []


def test_a_user_and_a_password_are_sent_and_never_shown(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    server.pages["/v1/models"] = http({"data": [{"id": "m"}]})
    url = server.url.replace("//", "//me:p%40ss%20PW@")
    engine = open_engine(f"{url}#max_drafts=3")
    assert "Authorization: Basic bWU6cEBzcyBQVw==" in server.heard[-1]  # me:p@ss PW
    assert not any("sk-secret" in head for head in server.heard)
    assert engine.spec == f"{server.url}#max_drafts=3"
    assert engine.variant({"max_drafts": 0}).spec == f"{server.url}#max_drafts=0"
    assert engine.facts()["engine"] == engine.spec
    server.pages["/v1/models"] = http({"data": []})
    for ask in (open_engine, doctor, explain):
        with pytest.raises(Unsupported) as caught:
            ask(url)
        assert "PW" not in str(caught.value)
        assert server.url in str(caught.value)
    assert doctor_served(server, url).url == server.url


def doctor_served(server, url):
    from outrider.doctor.server import ask

    server.pages["/v1/models"] = http({"data": [{"id": "m"}]})
    return ask(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://me:PW@h:x",
        "http://me:P/W@h",
        "me:PW@h:30000",
        "http://me:PW@h:1?a=b",
        "ftp://me:PW@h",
    ],
)
def test_an_address_that_is_none_shows_no_password(url):
    for ask in (base_url, open_engine):
        with pytest.raises(UsageError) as caught:
            ask(url)
        assert "PW" not in str(caught.value)
        assert "W@" not in str(caught.value)


@given(st.text(st.characters(exclude_characters="/?#", codec="utf-8")), st.text())
def test_no_address_is_shown_with_a_password(user, rest):
    assert shown_url(f"http://{user}@host/{rest}") == f"http://host/{rest}"
    assert shown_url(f"http://host/{rest}") == f"http://host/{rest}"


@pytest.mark.parametrize("key", ["sk-secret\n", "sk-\u202esecret"])
def test_a_key_that_cannot_be_sent_is_not_shown(monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(UsageError, match="no header can carry") as caught:
        Client("http://127.0.0.1:9")
    assert "secret" not in str(caught.value)


# -- what `audit`, `bench` and `tune` ask

LOGPROB = {"token": "a", "logprob": -0.1, "top_logprobs": [{"token": "a", "logprob": -0.1}]}
CHAT = {
    "index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "a"},
    "logprobs": {"content": [LOGPROB, LOGPROB]},
}  # fmt: skip
TEXT = {
    "index": 0, "finish_reason": "stop", "text": "ab",
    "logprobs": {
        "tokens": ["a", "b"], "token_logprobs": [-0.1, None],
        "top_logprobs": [{"a": -0.1, "c": -3}, None], "text_offset": [0, 1],
    },
}  # fmt: skip
USAGE = {"prompt_tokens": 1, "completion_tokens": 2}
WHOLE = {
    True: {"id": "1", "model": "m", "usage": USAGE, "choices": [CHAT]},
    False: {"id": "1", "model": "m", "usage": USAGE, "choices": [TEXT]},
}
PIECES = [{"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": n}}
          for n in (1, 2)]  # fmt: skip
ABOUT = {"version": "0.5.11", "speculative_algorithm": "OUTRIDER", "speculative_num_steps": 8}


def is_answer(found):
    assert isinstance(found, Answer)
    assert type(found.text) is str
    assert type(found.count) is int
    assert found.count >= 0
    for token in found.tokens:
        assert all(-1e39 < value <= 0.1 for _, value in token.top)
        assert token.logprob is None or -1e39 < token.logprob <= 0.1
    assert found.seconds >= 0


@given(st.booleans().flatmap(lambda chat: st.tuples(st.just(chat), written(WHOLE[chat]))))
def test_an_answer_is_one_or_refused(server, case):
    chat, document = case
    server.pages["/v1/models"] = http({"data": [{"id": "m"}]})
    server.pages["/v1/chat/completions"] = server.pages["/v1/completions"] = http(encoded(document))
    with refusal(Unsupported):
        (found,) = open_engine(server.url).ask([Query("a", chat, 3, logprobs=1)])
        is_answer(found)


@given(
    st.lists(written(*PIECES).map(encoded) | st.sampled_from((b"[DONE]", b"{}", b"")), max_size=4)
)
def test_a_stream_is_an_answer_or_refused(server, pieces):
    server.pages["/v1/models"] = http({"data": [{"id": "m"}]})
    server.pages["/v1/chat/completions"] = events(*pieces)
    with refusal(Unsupported):
        (found,) = open_engine(server.url).ask([Query("a", True, 3)], stream=True)
        is_answer(found)


@given(written({"data": [{"id": "m", "object": "model"}]}), written(ABOUT))
def test_a_model_and_its_facts_are_plain_words(server, models, about):
    server.pages = {"/v1/models": http(encoded(models)), "/get_server_info": http(encoded(about))}
    with refusal(Unsupported):
        facts = open_engine(server.url).facts()
        assert not STEERS & set(map(ord, "".join(map(str, facts.values()))))
        assert 0 <= facts.get("speculative_num_steps", 0) <= 2**31


def chat(logprob):
    return {"choices": [{**CHAT, "logprobs": {"content": [{**LOGPROB, "logprob": logprob}]}}]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"usage": {"completion_tokens": 1e999}}, "usage.completion_tokens"),
        ({"usage": {"completion_tokens": "3"}}, "usage.completion_tokens"),
        ({"choices": []}, "IndexError"),
        (chat(1000), "logprob"),
        (chat("x"), "logprob"),
        (chat(float("nan")), "logprob"),
    ],
)
def test_an_answer_with_other_values_is_refused_in_one_line(server, change, said):
    """They ended in "unexpected OverflowError; please report"."""
    server.pages["/v1/models"] = http({"data": [{"id": "m"}]})
    server.pages["/v1/chat/completions"] = http(WHOLE[True] | change)
    with refusal(Unsupported), pytest.raises(Unsupported, match=f"cannot be read .*{said}"):
        open_engine(server.url).ask([Query("a", True, 3)])


def test_an_endless_answer_ends(server, monkeypatch):
    monkeypatch.setattr(engine_server, "ANSWER", Limits(seconds=0.5))
    server.pages["/v1/models"] = http({"data": [{"id": "m"}]})

    def endless(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connection.sendall(b"data: " + json.dumps(PIECES[0]).encode() + b"\n\n")
            sleep(0.05)

    server.pages["/v1/chat/completions"] = endless
    with pytest.raises(Unsupported, match=r"stopped answering \(timed out"):
        open_engine(server.url).ask([Query("a", True, 3)], stream=True)


def test_the_first_answer_that_fails_ends_the_others(server):
    server.pages["/v1/models"] = http({"data": [{"id": "m"}]})
    server.pages["/v1/completions"] = silence
    server.pages["/v1/chat/completions"] = http(b"", 500)
    started = monotonic()
    with pytest.raises(Unsupported, match="answered 500"):
        open_engine(server.url).ask([Query("a", chat) for chat in (False, True, False)], 3)
    assert monotonic() - started < 8


# -- counters

NAMES = st.sampled_from((
    *("outrider:verify_steps_total", "outrider:accepted_at_total", "outrider:proposed_at_total"),
    *("outrider:step_seconds_total", "outrider:fallbacks_total", "outrider:draft_tokens_total"),
    *("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total"),
))  # fmt: skip
LABELS = st.sampled_from((
    *('position="1"', 'position="300000000"', 'position="-1"', 'position="x"', 'position="1_0"'),
    *('part="forward"', 'part="\x1b]0;x\x07"', 'drafter="<b>"', "a", 'a="', "a" * 5000, 'a="\\"'),
))  # fmt: skip
VALUES = st.sampled_from((
    *("1", "1.5", "-1", "NaN", "+Inf", "1e999", "1e300", "x", "", "1 1700000000", "0x1", "9" * 400),
)) | texts()  # fmt: skip
LINES = st.builds(
    "{}{{{}}} {}".format, NAMES, st.lists(LABELS, max_size=3).map(",".join), VALUES
) | st.builds("{} {}".format, NAMES, VALUES)


def test_counters_are_numbers_or_refused_for_one(server):
    server.pages["/v1/models"] = http({"data": [{"id": "m"}]})
    server.pages["/metrics"] = http(b"outrider:verify_steps_total NaN\n")
    with pytest.raises(Unsupported, match=r"/metrics has counters that cannot be read"):
        open_engine(server.url).counts()
    server.pages["/metrics"] = http(b"foo bar\n")
    assert open_engine(server.url).counts() is None


@given(st.lists(LINES | texts(), max_size=6).map("\n".join))
def test_counters_are_numbers_or_refused(page):
    page = f"outrider:verify_steps_total 3\n{page}"
    with refusal(Unsupported):
        counts = counts_of(page, "http://h:1/metrics")
        assert isinstance(counts, Counts)
        said = counts.as_json()
        json.dumps(said, allow_nan=False)
        places = [*said["accepted_at"], *said["proposed_at"]]
        assert all(1 <= int(place) <= 1024 for place in places)
        words = [key for value in said.values() if isinstance(value, dict) for key in value]
        assert not STEERS & set(map(ord, "".join(words)))


@pytest.mark.parametrize(
    "line",
    [
        "{%s} 1",
        '{a="%s} 1',
        '{a="%s"',
        '{%s="x"} 1',
        '{a="x",%s} 1',
        " %s",
        " 1%s x",
    ],
)
@pytest.mark.parametrize("filler", ["a", '\\"', 'a="b",', " ", "{"])
def test_counters_are_read_in_linear_time(line, filler):
    """40,000 characters took 12.7 s, and four times as many 16 times as long."""
    text = ("outrider:verify_steps_total" + line % (filler * 60_000)[:60_000] + "\n") * 10
    started = thread_time()  # others may use the machine
    with refusal(Unsupported):
        counts_of(text, "here")
    assert thread_time() - started < 2


def test_lines_of_others_are_skipped():
    text = 'foo bar\nx{ 1\nsglang:a_total{b="c"} NaN\noutrider:emitted_tokens_total 3\r\n'
    assert parse_metrics(text) == [("outrider:emitted_tokens_total", {}, 3.0)]


# -- doctor

INFO = {
    "model_path": "/somewhere/target", "tokenizer_path": "/somewhere/target", "version": "0.5.11",
    "speculative_algorithm": "OUTRIDER", "speculative_num_steps": 8, "context_length": 512,
    "speculative_draft_model_path": "/somewhere/draft", "max_total_num_tokens": 2048,
    "max_running_requests": 8, "tp_size": 1, "dtype": "float32", "device": "cpu",
}  # fmt: skip
CARD = {"id": "m", "root": "m", "owned_by": "vllm", "max_model_len": 512}


def doctor(url):
    from outrider.doctor.pair import Plan
    from outrider.doctor.run import examine, show
    from outrider.report.console import Terminal

    report = examine(None, None, url, Plan(), 8.0)
    console = Terminal(file=io.StringIO(), width=100)
    show(report, console, verbose=True)
    said = console.file.getvalue()
    assert not STEERS & set(map(ord, said))
    json.dumps(report.as_json())


@given(st.booleans(), written({"model_path": "/somewhere/target"}), written(INFO))
def test_doctor_says_what_a_server_says(server, is_sglang, first, second):
    if is_sglang:
        server.pages = {"/model_info": http(encoded(first)), "/server_info": http(encoded(second))}
    with refusal(Unsupported):
        doctor(server.url)


@given(written({"data": [CARD]}), written({"version": "0.32.0"}))
def test_doctor_says_what_another_server_says(server, models, version):
    server.pages = {"/v1/models": http(encoded(models)), "/version": http(encoded(version))}
    with refusal(Unsupported):
        doctor(server.url)


@pytest.mark.parametrize(
    "change",
    [
        {"tp_size": 0},
        {"tp_size": "x"},
        {"context_length": 1e999},
        {"speculative_num_steps": -3},
        {"dtype": ["float32"]},
        {"speculative_accept_threshold_acc": "x"},
        {"version": "0.5.11\nserver  ok"},
    ],
)
def test_doctor_refuses_other_values_in_one_line(server, change):
    server.pages["/model_info"] = http({"model_path": "/somewhere/target"})
    server.pages["/server_info"] = http(INFO | change)
    with refusal(Unsupported), pytest.raises(Unsupported, match="/server_info answers cannot be"):
        doctor(server.url)


def test_doctor_takes_a_name_that_can_be_no_path(server):
    server.pages["/model_info"] = http({"model_path": "m" * 999})
    server.pages["/server_info"] = http(INFO)
    doctor(server.url)


# -- explain


def explain(url):
    from outrider.explain.page import page
    from outrider.explain.recording import ExplainOptions
    from outrider.explain.server import record
    from outrider.explain.terminal import show
    from outrider.explain.walk import make_walk
    from outrider.report.console import Terminal

    recording, decode = record(ExplainOptions("a", max_tokens=60), url, lambda count: None)
    try:
        walk = make_walk(recording, decode, {})
    except (ValueError, LookupError):  # `run` says it
        return
    console = Terminal(file=io.StringIO(), width=100)
    show(walk, console)
    assert not STEERS & set(map(ord, console.file.getvalue()))
    page(walk).encode()


SPELLED = {"text": ["word"] * 4000}


def explained(server, **pages):
    """Let a server answer; its tokenizer spells as many lists as it is asked for."""
    server.pages = {
        "/server_info": http(INFO), "/tokenize": http({"tokens": [1, 2, 3]}),
        "/generate": events(json.dumps(REPLY).encode()), "/detokenize": http(SPELLED),
    } | pages  # fmt: skip


@given(written(REPLY).map(encoded), st.sampled_from((b"", b"{}", b'{"meta_info": 3}')))
def test_explain_shows_what_a_server_writes(server, monkeypatch_module, last, other):
    explained(server, **{"/generate": events(other, last.replace(b"\n", b" "))})
    with refusal(Unsupported):
        explain(server.url)


@given(written(INFO), written({"tokens": [1, 2, 3]}), st.none() | values())
def test_explain_shows_what_a_server_says_of_itself(server, monkeypatch_module, about, ids, text):
    explained(server, **{"/server_info": http(encoded(about)), "/tokenize": http(encoded(ids))})
    if text is not None:
        server.pages["/detokenize"] = http({"text": [text] * 5})
    with refusal(Unsupported):
        explain(server.url)


@pytest.fixture(scope="module")
def monkeypatch_module():
    """Spell as many texts as are asked for: the raw server does not look at what it is asked."""
    from outrider.explain.server import Server

    def decode(self, lists):
        found = spelled(self, [[0]] * len(SPELLED["text"]))
        return found[: len(lists)] + ["x"] * (len(lists) - len(found))

    spelled = Server.decode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "decode", decode)
        yield


def test_twin_a_good_server_is_shown(server, monkeypatch_module, capsys):
    """Else the tests above could refuse everything."""
    explained(server)
    explain(server.url)
    server.pages = {"/model_info": http(INFO), "/server_info": http(INFO)}
    doctor(server.url)
    server.pages = {"/v1/models": http({"data": [CARD]}), "/version": http({"version": "1"})}
    doctor(server.url)
    server.pages["/get_server_info"] = http(ABOUT)
    engine = open_engine(server.url)
    assert isinstance(engine, ServerEngine)
    assert engine.facts() == {"engine": server.url, "model": "m", **ABOUT}
    server.pages["/v1/chat/completions"] = http(WHOLE[True])
    (found,) = engine.ask([Query("a", True, 3, logprobs=1)])
    assert [token.top for token in found.tokens] == [(("a", -0.1),)] * 2
    server.pages["/v1/completions"] = http(WHOLE[False])
    (found,) = engine.ask([Query("a", False, 3, logprobs=1)])
    assert [token.top for token in found.tokens] == [(("a", -0.1), ("c", -3.0)), ()]
