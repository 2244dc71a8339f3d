"""What a server says, with a little server that says it."""

from __future__ import annotations

import pytest
from paper import TINY

from outrider.doctor.model import read_model
from outrider.doctor.pair import Plan
from outrider.doctor.server import ask, check_server
from outrider.errors import Unsupported

TARGET = str(TINY / "target")
ARGUMENTS = {
    "version": "0.5.11",
    "device": "cuda",
    "speculative_algorithm": "OUTRIDER",
    "speculative_num_steps": 5,
    "speculative_draft_model_path": str(TINY / "draft"),
    "enable_deterministic_inference": True,
    "tp_size": 2,
    "max_total_num_tokens": 100_000,
    "dtype": "auto",
}


def sglang(model=TARGET, **arguments):
    said = ARGUMENTS | {"served_model_name": model} | arguments
    return {"/model_info": {"model_path": model}, "/server_info": said}


def check(url, target=TARGET, draft=None, **plan):
    served = ask(url)
    models = [read_model(str(path)) if path else None for path in (target, draft)]
    return served, list(check_server(served, *models, served.plan(Plan(**plan))))


def levels(found):
    return {finding.level for finding in found}


@pytest.mark.parametrize("address", ["{}", "{}/", "{}/v1", "{}/v1/"])
def test_outrider_in_sglang(serve, address):
    served, found = check(address.format(serve(sglang())))
    assert levels(found) == {"ok"}
    assert any("OUTRIDER is on: K = 5" in finding.what for finding in found)
    plan = served.plan(Plan(tp=1, drafts=3))
    assert (plan.tp, plan.drafts, plan.dtype) == (2, 5, None)
    # room for all of the server's drafts, the cost of no more than were asked about
    assert (plan.weighed, served.plan(Plan(drafts=9)).weighed) == (3, 5)


def test_older_pages_of_sglang(serve):
    pages = {path.replace("/", "/get_"): page for path, page in sglang().items()}
    served, _ = check(serve(pages))
    assert served.versions == {"sglang": "0.5.11"}


@pytest.mark.parametrize(
    ("change", "level", "said"),
    [
        ({"speculative_algorithm": None}, "note", "decodes plainly"),
        ({"speculative_algorithm": "EAGLE"}, "warning", "SGLang's own EAGLE"),
        ({"enable_deterministic_inference": False}, "note", "not deterministic"),
        ({"version": "0.5.12"}, "warning", "SGLang 0.5.12; Outrider knows 0.5.11 or 0.5.23"),
        ({"speculative_draft_model_path": "/other/small"}, "warning", "its draft model is"),
        ({"max_total_num_tokens": 4095}, "note", "room for 4,095 tokens, 7 requests of 512"),
        ({"max_total_num_tokens": 511}, "warning", "room for 511 tokens"),
    ],
)
def test_what_is_worth_a_word(serve, change, level, said):
    pytest.importorskip("torch")
    _, found = check(serve(sglang(**change)), draft=TINY / "draft", requests=8, context=512)
    assert [finding.level for finding in found if said in finding.what] == [level]


def test_settings_that_outrider_refuses(serve):
    """Only of a server that runs without it: with it they would have stopped the server."""
    pytest.importorskip("torch")
    settings = {"speculative_algorithm": None, "pp_size": 2, "lora_paths": None}
    settings["enable_hierarchical_cache"] = True
    _, found = check(serve(sglang(**settings)))
    refused = [finding.what for finding in found if "is refused" in finding.what]
    assert len(refused) == 2
    assert "--pp-size" in refused[0]
    assert "--enable-hierarchical-cache" in refused[1]


def test_another_model(serve):
    url = serve(sglang("/models/other"))
    with pytest.raises(Unsupported, match=r"serves /models/other, not .*tiny/target"):
        check(url)


@pytest.mark.parametrize(
    ("called", "same"),
    [
        ("/elsewhere/Target", True),  # a path of another machine
        (TARGET + "/", True),
        (str(TINY / "draft"), False),
        ("target-v2", False),
    ],
)
def test_how_a_model_is_recognized(serve, called, same):
    served = ask(serve({"/v1/models": {"data": [{"id": called}]}}))
    model = read_model(TARGET)
    if same:
        assert levels(check_server(served, model, None, Plan())) == {"ok", "note"}
    else:
        with pytest.raises(Unsupported, match="not"):
            list(check_server(served, model, None, Plan()))


def test_a_copy_at_another_path_is_the_same_model(serve, tiny_copy):
    copy = tiny_copy("target", "config.json", lambda content: None)
    assert levels(check(serve(sglang(str(copy))))[1]) == {"ok"}


def test_any_server_with_openais_api(serve):
    card = {"id": "target", "owned_by": "vllm", "max_model_len": 300}
    pages = {"/v1/models": {"data": [card]}, "/version": {"version": "0.32.0"}}
    served, found = check(serve(pages))
    assert (served.versions, served.arguments) == ({"vllm": "0.32.0"}, None)
    assert served.plan(Plan()).context == 300
    assert "outrider audit" in found[-1].fix


@pytest.mark.parametrize(
    ("pages", "said"),
    [
        ({}, "no model server"),
        ({"/v1/models": b"<html>"}, "no model server"),
        ({"/v1/models": {"data": "x"}}, "v1/models answers cannot be read .data: Input should be"),
        ({"/v1/models": {"data": []}}, "serves no model"),
    ],
)
def test_what_is_no_model_server(serve, pages, said):
    with pytest.raises(Unsupported, match=said):
        ask(serve(pages))


def test_a_server_that_wants_a_key(serve, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    url = serve(sglang(), key="secret")
    with pytest.raises(Unsupported, match="OPENAI_API_KEY"):
        ask(url)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert ask(url).models == (TARGET,)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "127.0.0.1:1", "http://no.such.host.invalid"]
)
def test_nobody_answers(url):
    with pytest.raises(Unsupported, match="no server answers"):
        ask(url)
