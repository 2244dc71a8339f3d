"""What reaches the scheduler by other ways than a prompt: compared with bare SGLang.

One server has all of it, and two tokenizer workers.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang
import support_matrix
import torch
import workload
from outrider_test_site import counting_processor, no_repeat_processor
from safetensors.torch import load_file
from server import proposed

from outrider.engines.sglang.plugin import installed_hooks

TINY = Path(__file__).parents[3] / "src" / "outrider" / "assets" / "tiny"
FLAGS = [
    *("--dtype", "float32", "--mem-fraction-static", "0.1", "--attention-backend", "outrider"),
    *("--max-total-tokens", "4096", "--max-running-requests", "16"),
    *("--enable-deterministic-inference", "--enable-custom-logit-processor"),
]
OURS = ["--speculative-algorithm", "OUTRIDER", "--tokenizer-worker-num", "2", "--enable-metrics"]
TEXTS = [f"{text} {text}" for text in workload.OPENINGS[:6]]


@pytest.fixture(scope="module")
def servers(launch, profile):
    """Return bare SGLang, and SGLang with us and two tokenizer workers."""
    content = profile(drafter="ngram", drafters={"ngram": {"min_n": 1}})
    # on a busy machine a worker imports SGLang for longer than uvicorn waits: 0.5.11, 0.5.23
    content["OUTRIDER_TEST_PATIENCE"] = "60"
    content["SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT"] = "60"
    # bare SGLang's processors see the output one token late under overlap
    bare = launch("door-bare", TINY / "target", *FLAGS, "--disable-overlap-schedule")
    # uvicorn starts the workers, from an interpreter that SGLang was started with
    ours = launch("door-ours", TINY / "target", *FLAGS, *OURS, plain=True, **content)
    return bare.wait(), ours.wait()


def body(text, **params):
    params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True, **params}
    return {"text": text, "sampling_params": params}


def test_each_tokenizer_worker_has_the_hooks(servers):
    """Connections are new: two workers take them in turn, or as chance has it."""
    bare, ours = servers
    asked = [("/generate", body(text)) for text in TEXTS]
    answers = ours.ask_all(asked * 4, 8)
    assert [*map(workload.essence, answers)] == [*map(workload.essence, bare.ask_all(asked, 4))] * 4
    # what our hook adds to SGLang's own fields
    assert all("spec_accept_rate" in answer["meta_info"] for answer in answers)
    assert sum(proposed(answer["meta_info"]) for answer in answers) > 0
    explained = body(TEXTS[0], custom_params={"outrider": {"explain": True}})
    for _ in range(8):
        assert ours.ask("/generate", explained)["meta_info"]["outrider_steps"]
        wrong = body(TEXTS[0], custom_params={"outrider": {"drafter": "nope"}})
        refused = ours.post("/generate", wrong)
        assert refused.status_code == 400
        assert "'nope' is not among this server's drafters" in refused.text
        assert ours.post("/generate", body(TEXTS[0], min_p=0.5)).status_code == 400


HOSTILE = [
    *({"temperature": "1e999"}, {"temperature": "-0.5"}, {"temperature": "1e300"}),
    *({"top_k": str(10**30)}, {"sampling_seed": str(2**64)}, {"max_new_tokens": str(2**40)}),
    *({"logit_bias": '{"5": 1e999}'}, {"logit_bias": '{"5": "x"}'}, {"logit_bias": '{"-5": 1}'}),
    *({"stop_token_ids": f"[{2**70}]"}, {"stop": "[7]"}, {"regex": "7"}, {"n": str(10**9)}),
    *({"repetition_penalty": "1e-45"}, {"logit_bias": '{"5": 3e38}', "top_k": "3", "top_p": "0.5"}),
    {"min_new_tokens": "3", "stop_token_ids": "[99999]"},
    {"min_new_tokens": str(2**31), "max_new_tokens": str(2**32)},
    {"custom_params": '{"a": ' * 200 + "1" + "}" * 200},
    *({"json_schema": '"{\\"type\\": \\"nothing\\"}"'}, {"regex": '"\\u0000"'}),
    {"json_schema": json.dumps('{"title": "' + "]" * 10**6 + '", "const": ' + "[" * 10**6)},
    *({"structural_tag": '"{}"'}, {"structural_tag": '"{\\"structures\\": []}"'}),
]
"""Sampling parameters as JSON has them. Bare SGLang's scheduler raises at some of them."""

HOSTILE_FIELDS = [
    *({"top_logprobs_num": "1000000000"}, {"top_logprobs_num": "-1"}),
    *({"token_ids_logprob": "[99999]"}, {"token_ids_logprob": "[-1]"}),
    *({"extra_key": '"\\ud800"'}, {"logprob_start_len": str(2**40)}),
]


def test_a_hostile_request_costs_itself_only(servers):
    ours = servers[1]
    expected = ours.ask("/generate", body(TEXTS[0]))["output_ids"]
    for params in HOSTILE:
        fields = ", ".join(f'"{name}": {value}' for name, value in params.items())
        said = f'{{"text": "a", "sampling_params": {{{fields}}}}}'
        assert ours.post_text("/generate", said).status_code in (400, 422), params
    for one in HOSTILE_FIELDS:
        fields = ", ".join(f'"{name}": {value}' for name, value in one.items())
        said = f'{{"text": "a", "return_logprob": true, {fields}}}'
        assert ours.post_text("/generate", said).status_code in (400, 422), one
    for asked in ({"text": ""}, {"text": ["a", ""]}, {"input_embeds": [[0.5]]}):
        assert ours.post("/generate", asked).status_code == 400, asked
    for params in ({"regex": "a", "min_new_tokens": 5}, {"stop_token_ids": [*range(512)]}):
        params = {"temperature": 0.7, "min_new_tokens": 2, "max_new_tokens": 8, **params}
        # all tokens are forbidden; SGLang ends what its grammar does not take
        asked = {"text": "a", "sampling_params": params}
        assert ours.post("/generate", asked).status_code in (200, 400), params
    replaced = {**body(TEXTS[0]), "session_params": {"id": "s", "replace": True}}
    assert ours.post("/generate", replaced).status_code == 400
    assert ours.ask("/generate", body(TEXTS[0]))["output_ids"] == expected


def undrafted(server):
    """Return how many requests had no drafts because of their processors."""
    return sum(v for k, v in server.metrics().items() if 'reason="processor"' in k)


@pytest.mark.parametrize("company", [1, 6])
def test_processors(company, servers):
    """One that counts its calls, and one that looks at the text: beside others without."""
    before = undrafted(servers[1])
    counting, looking = counting_processor(), no_repeat_processor()
    asked = []
    for text in TEXTS:
        asked.append(("/generate", body(text)))
        for processor, params in ((counting, {"calls": 0}), (looking, {"window": 4})):
            wish = body(text, custom_params=params)
            asked.append(("/generate", {**wish, "custom_logit_processor": processor}))
    bare, ours = ([*map(workload.essence, s.ask_all(asked, company))] for s in servers)
    assert ours == bare
    assert undrafted(servers[1]) - before == len(TEXTS)


@pytest.mark.parametrize("company", [1, 6])
def test_no_new_tokens(company, servers):
    """Requests that generate nothing. Beside others, bare's logprobs depend on who those are."""
    silent, mixed = [], []
    for text in TEXTS:
        wish = body(text, max_new_tokens=0)
        for start in (-1, 0, 3):
            scored = {**wish, "return_logprob": True, "logprob_start_len": start}
            silent.append(("/generate", {**scored, "top_logprobs_num": 2}))
        mixed += [silent[-1], ("/generate", wish), ("/generate", body(text))]
    for one, other in zip(*(server.ask_all(silent, company) for server in servers), strict=True):
        assert workload.essence(one) == workload.essence(other)
        assert workload.furthest(workload.logprobs(one), workload.logprobs(other)) == 0
    for one, other in zip(*(server.ask_all(mixed, company) for server in servers), strict=True):
        assert workload.essence(one) == workload.essence(other)


REFUSED = {
    "beam_width": (body(TEXTS[0], beam_width=2), "Beam search is not supported with speculative"),
    "return_sampling_mask": (
        {**body(TEXTS[0], top_k=1), "return_sampling_mask": True},
        "return_sampling_mask is not supported with speculative",
    ),
}


@pytest.mark.skipif(sglang.__version__ == "0.5.11", reason="SGLang 0.5.23 is the first with these")
@pytest.mark.parametrize("what", REFUSED)
def test_what_sglang_refuses_beside_any_speculation(what, servers):
    asked, said = REFUSED[what]
    answer = servers[1].post("/generate", asked)
    assert (answer.status_code, said in answer.text) == (400, True), answer.text
    assert f"`{what}`" in " ".join(support_matrix.REQUESTS)


def test_acceptance_cannot_be_relaxed_later(servers):
    wanted = {"server_args": {"speculative_accept_threshold_single": 0.3}}
    answer = servers[1].post("/set_internal_state", wanted)
    assert (answer.status_code, "OUTRIDER" in answer.text) == (400, True), answer.text
    assert servers[1].post("/set_internal_state", {"server_args": {}}).ok


def payload(factor):
    """Return the weights of the last norm as SGLang's endpoint takes them."""
    from sglang.srt.utils import MultiprocessingSerializer

    torch.multiprocessing.set_sharing_strategy("file_system")
    name = "model.norm.weight"
    weight = load_file(TINY / "target" / "model.safetensors")[name].float() * factor
    return [MultiprocessingSerializer.serialize([(name, weight)], output_str=True)]


def update(server, path, wanted):
    """Give the server new weights, in a session where SGLang asks for one."""
    is_new = sglang.__version__ != "0.5.11"
    for step, asked in (("/begin_weight_update", {}), (path, wanted), ("/end_weight_update", {})):
        if step == path or is_new:
            answer = server.ask(step, asked)
            assert answer["success"], answer


def test_new_weights(servers):
    """Answers are those of the new weights: nothing is read from the cache of the old ones."""

    def answers(server):
        return [
            workload.essence(one)
            for one in server.ask_all([("/generate", body(text)) for text in TEXTS], 3)
        ]

    before, after, again = [], [], []
    for server in servers:
        before.append(answers(server))
        update(server, "/update_weights_from_tensor", {"serialized_named_tensors": payload(-1.0)})
        after.append(answers(server))
        reloaded = {"model_path": str(TINY / "target")}
        assert server.ask("/update_weights_from_disk", reloaded)["success"]
        again.append(answers(server))
        server.settle_down()
    assert before[0] == before[1] == again[0] == again[1]
    assert after[0] == after[1]
    assert all(old != new for old, new in zip(before[0], after[0], strict=True))


# -- what else the scheduler asks of our worker

ELSEWHERE = {
    "draft_runner_list": "--enable-multi-layer-eagle",
    "dump_info_records": "DSPARK",
    "set_dspark_forced_budget_frac": "DSPARK",
    "clear_info_records": "DSPARK",
    "get_confidence_budget_prepare": "DSPARK",
    "block_accept_estimate_log_suffix": "DSPARK",
}
"""What it asks of SGLang's own algorithms alone."""


WORKERS = {"draft_worker", "model_worker"}


def of_worker(node, names):
    """Say whether this is our worker, as the scheduler sees it. names: local ones for it"""
    if isinstance(node, ast.BoolOp):
        return any(of_worker(value, names) for value in node.values)
    return getattr(node, "attr", None) in WORKERS or getattr(node, "id", None) in names


def asked_of_workers():
    """Return the attributes that SGLang's scheduler asks of our worker."""
    found = set()
    for file in Path(sglang.__file__).parent.glob("srt/managers/**/*.py"):
        text = file.read_text()
        tree = ast.parse(text) if "draft_worker" in text else ast.Module([], [])
        for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
            nodes, names = list(ast.walk(function)), set(WORKERS)
            for node in nodes:
                if isinstance(node, ast.Assign) and of_worker(node.value, names):
                    names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            of_ours = [
                n for n in nodes if isinstance(n, ast.Attribute) and of_worker(n.value, names)
            ]
            found |= {node.attr for node in of_ours}
    return found


def test_the_worker_has_what_the_scheduler_asks():
    version = sglang.__version__.replace(".", "_")
    module = importlib.import_module(f"outrider.engines.sglang.workers.sglang_{version}")
    worker = getattr(module, f"Worker{version.replace('_', '').zfill(4)}")
    files = {Path(inspect.getfile(base)) for base in worker.__mro__[:-1]}
    source = "".join(file.read_text() for file in files if "outrider" in file.parts)
    asked = asked_of_workers() - ELSEWHERE.keys()
    assert "clear_cache_pool" in asked
    is_old = sglang.__version__ == "0.5.11"
    assert ("update_weights_from_tensor" if is_old else "weight_update_runners") in asked
    assert "forward_batch_generation" in asked
    missing = {
        name for name in asked if not hasattr(worker, name) and f"self.{name} = " not in source
    }
    # of the stand-in for a worker of a draft model
    assert missing <= {"draft_runner"}


@pytest.mark.parametrize("has_draft_model", [False, True])
def test_a_model_is_saved_with_its_draft_model(has_draft_model, monkeypatch):
    """SGLang's own code asks for a second address whenever there is a second worker."""
    saved = []

    def worker(name):
        save = SimpleNamespace(save_remote_model=lambda url: saved.append((name, url)))
        save.weight_exporter = save  # where 0.5.23 has it
        return SimpleNamespace(model_runner=save)

    ours = worker("wrong")
    ours.draft_model_worker = worker("draft") if has_draft_model else None
    scheduler = SimpleNamespace(tp_worker=worker("target"), draft_worker=ours)
    hooks = installed_hooks()
    (name,) = (name for name in hooks.table() if name.endswith("save_remote_model"))
    from outrider.engines.sglang.versions.contract import _resolve

    monkeypatch.setattr(hooks, "chosen_args", object)
    save = _resolve(name)
    original = getattr(save, "__wrapped__", save)
    asked = {"url": "a", "draft_url": "b"} if has_draft_model else {"url": "a"}
    hooks.save_remote_model(original, scheduler, asked)
    assert saved == [("target", "a"), ("draft", "b")][: 1 + has_draft_model]
    assert scheduler.draft_worker is ours
