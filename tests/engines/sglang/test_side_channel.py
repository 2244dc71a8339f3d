"""What answers tell of acceptance: nothing, if the profile says so.

The server streams in chunks of three tokens, though a step of it may give six. Its twin, which has
neither setting, is the server of test_explain.py: what is hidden here can be seen there.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import workload
from parity import COMMON, DETERMINISTIC, OUTRIDER
from server import session

MODEL = "stories260k"
FLUSH, DRAFTS = 3, 5
FLAGS = [*COMMON, *DETERMINISTIC, *OUTRIDER, "--max-total-tokens", "2048"]
KINDS = {
    "greedy": {},
    "whole chunks": {"max_new_tokens": 13 * FLUSH},
    "one token": {"max_new_tokens": 1},
    "seeded": {"temperature": 0.8, "sampling_seed": 7},
    "stop ids": {"stop_token_ids": [workload.PERIOD[MODEL]]},
    "stop strings": {"stop": ["little girl", " went to the park", "happy.", ". She", "8"]},
    "kept stop string": {"stop": ["was", " to"], "no_stop_trim": True},
    "its own interval": {"stream_interval": 7},
}


@pytest.fixture(scope="module")
def server(launch, model_dir, noisy, tmp_path_factory):
    """Return a server that keeps acceptance to itself. Only its profile says how many drafts."""
    model, path = model_dir(MODEL), tmp_path_factory.mktemp("profile") / "profile.yaml"
    quiet = {"report_acceptance": False, "flush_tokens": FLUSH, "max_drafts": DRAFTS}
    quiet["drafter"] = "model"
    path.write_text(json.dumps(quiet))
    draft = ["--speculative-draft-model-path", str(noisy(model))]
    return launch("quiet", model, *FLAGS, *draft, OUTRIDER_CONFIG=str(path)).wait()


def generate(kind, text, **more):
    params = {"temperature": 0, "max_new_tokens": 40, **KINDS[kind]}
    params["custom_params"] = {"outrider": {"max_drafts": DRAFTS}}
    return "/generate", {"text": text, "sampling_params": params, "return_logprob": True, **more}


def complete(text, chat, **more):
    content = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    body = {"model": "default", "max_tokens": 32, "temperature": 0, **content, **more}
    body["custom_params"] = {"outrider": {"max_drafts": DRAFTS}}
    return "/v1/chat/completions" if chat else "/v1/completions", body


def raw(server, path, body):
    """Return the bytes of an answer, streamed or not."""
    with session().post(server.url + path, json=body, stream=True, timeout=300) as response:
        assert response.ok, response.text[:500]
        return b"".join(response.iter_content(None))


def stream(server, path, body):
    """Return the pieces of a streamed answer."""
    if path != "/generate":
        body = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, **body}
    lines = raw(server, path, {**body, "stream": True}).split(b"\n")
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


def sizes(pieces):
    """Return how many tokens each piece brought."""
    told = [piece.get("meta_info") or piece.get("usage") for piece in pieces]
    counts = [usage["completion_tokens"] for usage in told if usage]
    new = [b - a for a, b in zip([0, *counts], counts, strict=False)]
    # OpenAI's API has pieces without tokens: for the role, for the end, for the usage
    return new if "meta_info" in pieces[0] else [n for n in new if n]


def are_flat(found):
    return all(n == FLUSH for n in found[:-1]) and 1 <= found[-1] <= FLUSH


def total(answer):
    return workload.essence(answer), answer["meta_info"]["output_token_logprobs"]


@pytest.mark.parametrize("kind", KINDS)
def test_streams_come_in_chunks_of_one_size(kind, server):
    """And bring in total what comes without streaming, each chunk a piece of it."""
    wishes = [generate(kind, text) for text in workload.OPENINGS]
    whole = server.ask_all(wishes, 6)
    with ThreadPoolExecutor(3) as pool:
        streams = list(pool.map(lambda wish: stream(server, *wish), wishes))
    for pieces, answer in zip(streams, whole, strict=True):
        assert are_flat(sizes(pieces)), sizes(pieces)
        assert total(pieces[-1]) == total(answer)
        for piece in pieces:
            count = piece["meta_info"]["completion_tokens"]
            assert piece["output_ids"] == answer["output_ids"][:count]
            assert answer["text"].startswith(piece["text"])
            assert len(piece["meta_info"]["output_token_logprobs"]) == count


@pytest.mark.parametrize("chat", [False, True])
def test_openais_streams_too(chat, server):
    for text in workload.OPENINGS[:3]:
        path, body = complete(text, chat)
        assert are_flat(found := sizes(stream(server, path, body))), found
        streamed = server.ask(path, {**body, "stream": True})["choices"][0]
        (whole,) = server.ask(path, body)["choices"]
        assert streamed["text"] == (whole["message"]["content"] if chat else whole["text"])
        assert streamed["finish_reason"] == whole["finish_reason"]


def test_several_streams_of_one_request(server):
    path, body = generate("seeded", workload.OPENINGS[0])
    body["sampling_params"]["n"] = 2
    whole, pieces = server.ask(path, body), stream(server, path, body)
    for index, answer in enumerate(whole):
        mine = [piece for piece in pieces if piece["index"] == index]
        assert are_flat(sizes(mine)), sizes(mine)
        assert total(mine[-1]) == total(answer)


def test_answers_do_not_tell_what_was_accepted(server):
    """Not in a byte of them."""
    text = workload.OPENINGS[0]
    for path, body in (generate("greedy", text), complete(text, False), complete(text, True)):
        for streams in (False, True):
            answer = raw(server, path, {**body, "stream": streams})
            assert len(answer) > 100
            assert not [word for word in (b"spec_", b"accept", b"outrider") if word in answer]


def test_what_would_tell_is_refused(server):
    path, body = generate("greedy", workload.OPENINGS[0])
    body["sampling_params"]["custom_params"] = {"outrider": {"explain": True}}
    refused = server.post(path, body)
    assert refused.status_code == 400
    assert "does not report acceptance" in refused.json()["error"]["message"]
    body["sampling_params"]["custom_params"] = {"outrider": {"explain": False}}
    assert server.post(path, body).ok


def test_the_profile_alone_says_how_many_drafts(server):
    info = session().get(f"{server.url}/get_server_info", timeout=30).json()
    assert info["speculative_num_steps"] == DRAFTS


def test_no_slot_is_lost(server):
    server.settle_down()
