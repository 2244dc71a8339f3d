"""The doors by which others' input comes in. Each gets one hostile input from a seeded source.

A door returns if the input was taken or refused as it should be: with its declared error, whose
message is one short line. What it prints and writes must steer neither a terminal nor a page.
"""

from __future__ import annotations

import io
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

from hostile import LITERALS, Hostile, Tags, dumps

from outrider.errors import Unsupported, UsageError

ROOT = Path(__file__).parents[1]
TINY = ROOT / "src" / "outrider" / "assets" / "tiny"
RESULT = ROOT / "benchmarks" / "results" / "bench_sglang.json"
REPLY = ROOT / "tests" / "explain" / "sglang_reply.json"

LONGEST = 2500
"""Characters that a refusal may have."""

STEERS = {
    *range(9),
    *range(11, 32),
    *range(127, 160),
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
}
"""Characters that steer a terminal."""

Door = Callable[[Hostile, Path], None]
"""Takes a source of hostile input, and a folder that is its own."""

_numbers = count()


class Broken(Exception):
    """An input had an effect that no input may have."""


@contextmanager
def refusal(error: type[Exception]) -> Iterator[None]:
    """Take the declared error as an answer, if it is one short line."""
    try:
        yield
    except error as said:
        if len(str(said)) > LONGEST or len(str(said).splitlines()) > 1:
            raise Broken(f"a refusal of {len(str(said))} characters or several lines") from said


@contextmanager
def terminal() -> Iterator[None]:
    """Look at what is printed."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    try:
        with redirect_stdout(out), redirect_stderr(out):
            yield
    except SystemExit:
        pass  # a command's exit code
    said = out.buffer.getvalue().decode()  # type: ignore[attr-defined]
    if steering := STEERS & set(map(ord, said)):
        raise Broken(f"the terminal gets {sorted(map(hex, steering))}")


def look_at(html: str, scripts: int = 0) -> None:
    """Check that a page runs and loads nothing but its own scripts, and can be written."""
    html.encode()
    found = Tags(html).found
    if found != ["script"] * scripts:
        raise Broken(f"the page has {found}")
    if steering := STEERS & set(map(ord, html)):
        raise Broken(f"the page has {sorted(map(hex, steering))}")


def own(folder: Path, suffix: str = "") -> Path:
    """Return a path in the folder that was not used before."""
    return folder / f"{next(_numbers)}{suffix}"


# -- requests and files


def custom_params(rng: Hostile, folder: Path) -> None:
    """Options of an SGLang request, as its HTTP server parses them."""
    from outrider.hosts.sglang.profile import request_options

    options: Any = {"max_drafts": 3, "drafter": "ngram", "explain": False}
    options = rng.choice((rng.mutated(options), rng.mutated(options), rng.value()))
    options = rng.nested() if rng.random() < 0.05 else options
    document = rng.choice(({"outrider": options}, {"outrider": options, "a": 1}, options))
    try:
        document = json.loads(rng.written(document))
    except (ValueError, RecursionError):  # the host's own parser refuses it
        return
    with refusal(ValueError):
        found = request_options(document, ["adaptive", "ngram", "none"], rng.random() < 0.5)
        if type(found.max_drafts) not in (int, type(None)) or (found.max_drafts or 0) < 0:
            raise Broken(f"max_drafts {found.max_drafts!r}")


def profile(rng: Hostile, folder: Path) -> None:
    """A server's profile, in YAML."""
    import yaml

    from outrider.hosts.sglang.profile import Profile, load_profile

    usual = {
        "drafter": "adaptive", "drafters": {"suffix": {"shared_tokens": 10}, "h": {"path": "x"}},
        "max_drafts": 4, "draft_bits": 8, "draft_timeout": 0.5, "report_acceptance": False,
        "flush_tokens": 8, "verify_pass": "rows", "tracing": False,
    }  # fmt: skip
    what = rng.randrange(4)
    if what == 0:
        text = rng.written(rng.choice((rng.mutated(usual), rng.nested())))
    elif what == 1:  # ten lists of ten of the one before
        text = "a0: &a0 x\n" + "".join(
            f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]\n" for i in range(9)
        )
        text += f"{rng.choice(('drafters', 'drafter'))}: *a9\n"
    else:
        lines = yaml.safe_dump(usual).splitlines()
        at = rng.randrange(len(lines))
        lines[at] = rng.choice((lines[at].partition(":")[0] + ": ", "")) + rng.choice(LITERALS)
        text = "\n".join(lines)
    file = own(folder, ".yaml")
    file.write_bytes(rng.damaged(text.encode(errors="replace")) if rng.random() < 0.2
                     else text.encode(errors="replace"))  # fmt: skip
    with refusal(Unsupported):
        if not isinstance(load_profile(str(file)), Profile):
            raise Broken("no profile")


def prompts(rng: Hostile, folder: Path) -> None:
    """A file of prompts, text or JSON lines."""
    from outrider.audit.prompts import read_prompts

    asked = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}]
    file = own(folder, rng.choice((".txt", ".jsonl", ".jsonl")))
    lines = [rng.written(rng.choice((rng.mutated(one), rng.nested(), one))) for one in asked]
    content = "\n".join(lines).encode(errors="replace")
    file.write_bytes(rng.damaged(content) if rng.random() < 0.2 else content)
    with refusal(UsageError):
        for prompt in read_prompts(file):
            prompt.encode()  # it can be sent


def bench_results(rng: Hostile, folder: Path) -> None:
    """Two results given to `outrider bench --compare`."""
    from outrider.bench.run import run_compare

    old = json.loads(RESULT.read_text())
    old["cells"], files = old["cells"][:3], [own(folder, ".json"), own(folder, ".json")]
    for file in files:
        # few of the places that are read lie elsewhere
        made = {**old, "cells": rng.mutated(old["cells"])} if rng.random() < 0.8 else old
        text = rng.written(rng.mutated(made) if rng.random() < 0.3 else made)
        file.write_bytes(text.encode(errors="replace"))
    with refusal(UsageError), terminal():
        run_compare(files[0], files[1], rng.random() < 0.3)


def trial_parts(rng: Hostile, folder: Path) -> None:
    """Finished parts of `outrider selftest --server`: a damaged one is to be done again."""
    from outrider.trial.parts import Parts

    parts = Parts(own(folder), {"versions": {"a": "1"}}, {"requests": 3})
    found = {"answers": {"0": ["text", 3, "stop", []]}, "refused": {}, "speed": []}
    parts.put("bare", found)
    file = parts.path("bare")
    before = file.read_bytes()
    after = rng.choice((
        rng.damaged(before),
        rng.written(rng.mutated(json.loads(before))).encode(errors="replace"),
        dumps(rng.nested()).encode(),
    ))  # fmt: skip
    file.write_bytes(after)
    if parts.get("bare") not in (None, found):
        raise Broken("a part that was changed is used")


# -- checkpoints


def heads(rng: Hostile, folder: Path) -> None:
    """A head's directory, given to `load_drafter` and to its target."""
    from torch import nn

    import outrider
    from outrider.hosts.transformers.heads import HeadFile

    model = _target()
    path = _broken_copy(rng, TINY / rng.choice(("head", "mtp", "dflash")), own(folder))
    with refusal(Unsupported):
        found = outrider.load_drafter(path)
        if isinstance(found, HeadFile):
            drafter = found.drafter(model, model.config.vocab_size)
            (head,) = (one for one in vars(drafter).values() if isinstance(one, nn.Module))
            if not all(weight.isfinite().all() for weight in head.parameters()):
                raise Broken("a head with NaN or infinite weights")
    shutil.rmtree(path)


def drafts(rng: Hostile, folder: Path) -> None:
    """A draft model's directory, given to `load_drafter`."""
    import outrider

    path = _broken_copy(rng, TINY / "draft", own(folder))
    with refusal(Unsupported), redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        found = outrider.load_drafter(path)
        if not all(w.isfinite().all() for w in getattr(found, "parameters", list)()):
            raise Broken("a model with NaN or infinite weights")
    shutil.rmtree(path)


def doctor(rng: Hostile, folder: Path) -> None:
    """A target's, a draft's or a head's directory, given to `outrider doctor`."""
    from outrider.doctor.pair import Plan
    from outrider.doctor.run import run

    which = rng.choice(("target", "draft", "head", "mtp", "dflash"))
    path = _broken_copy(rng, TINY / which, own(folder))
    pair = (path, None) if which == "target" else (TINY / "target", path)
    names = [str(one) if one else None for one in pair]
    with refusal(Unsupported), terminal():
        run(*names, None, Plan(), 8.0, rng.random() < 0.5, rng.random() < 0.3)
    shutil.rmtree(path)


_loaded: list[Any] = []


def _target() -> Any:
    if not _loaded:
        from transformers import AutoModelForCausalLM

        _loaded.append(AutoModelForCausalLM.from_pretrained(TINY / "target").eval())
    return _loaded[0]


def _broken_copy(rng: Hostile, source: Path, path: Path) -> Path:
    """Copy a model's directory with one file of it, or one tensor, broken."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, path)
    weights, what = path / "model.safetensors", rng.randrange(8)
    if what < 3:
        file = path / (
            "config.json" if what else rng.choice(sorted(p.name for p in path.iterdir()))
        )
        content = file.read_bytes()
        if file.suffix == ".json" and rng.random() < 0.8:
            changed = rng.written(rng.mutated(json.loads(content)))
            file.write_bytes(changed.encode(errors="replace"))
        else:
            file.write_bytes(rng.damaged(content))
        return path
    if what == 3:
        weights.write_bytes(rng.damaged(weights.read_bytes()))
        return path
    if what == 4:  # a pickle that would run something
        weights.unlink()
        for name in ("pytorch_model.bin", "model.pt"):
            (path / name).write_bytes(b"cos\nsystem\n(S'exit 3'\ntR.")
        return path
    tensors = load_file(weights)
    name = rng.choice(sorted(tensors))
    if what == 5:
        del tensors[name]
    elif what == 6 and tensors[name].is_floating_point():
        tensors[name].view(-1)[rng.randrange(tensors[name].numel())] = rng.choice(
            (float("nan"), float("inf"))
        )
    else:
        tensors[name] = torch.zeros(rng.choice(((), (0,), (3,), (1, 2, 3), (2**12, 7))))
    save_file(tensors, weights, metadata={"format": "pt"})
    return path


# -- what servers and models say


class _Loopback(ThreadingHTTPServer):
    """Answers with `pages`, whatever is asked."""

    daemon_threads = True
    pages: Mapping[str, bytes] = {}

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: _Loopback

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path)
        self.send_response(404 if page is None else 200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(page or b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *args: Any) -> None:
        pass


_loopbacks: list[_Loopback] = []


def _served(rng: Hostile, pages: Mapping[str, Any]) -> str:
    """Serve pages of which one is changed. Returns the address."""
    if not _loopbacks:
        _loopbacks.append(_Loopback())
    chosen = rng.choice(sorted(pages))
    made = {}
    for path, page in pages.items():
        text = rng.written(rng.mutated(page)) if path == chosen else dumps(page)
        prefix = "data: " if path == "/generate" else ""
        made[path] = (prefix + text.replace("\n", " ") + "\n\n").encode(errors="replace")
    _loopbacks[0].pages = made
    return _loopbacks[0].url


INFO = {
    "model_path": "/somewhere/target", "tokenizer_path": "/somewhere/target", "version": "0.5.11",
    "speculative_algorithm": "OUTRIDER", "speculative_num_steps": 8, "context_length": 512,
    "speculative_draft_model_path": "/somewhere/draft", "max_total_num_tokens": 2048,
    "max_running_requests": 8, "tp_size": 1, "dtype": "float32", "device": "cpu",
}  # fmt: skip


def explain(rng: Hostile, folder: Path) -> None:
    """What a server answers to `outrider explain --url`: the terminal, the page, the JSON."""
    from outrider.explain.recording import ExplainOptions
    from outrider.explain.run import run

    reply = json.loads(REPLY.read_text())
    texts = [rng.text() if rng.random() < 0.3 else "word" for _ in range(4000)]
    pages = {"/server_info": INFO, "/generate": reply, "/tokenize": {"tokens": [1, 2, 3]}}
    pages["/detokenize"] = {"text": texts}
    out = own(folder)
    with refusal(Unsupported), terminal():
        url = _served(rng, pages)
        run(ExplainOptions(rng.text() or "a", max_tokens=60), url=url, out=out)
    if (out / "explain.html").exists():
        look_at((out / "explain.html").read_text("utf-8"), scripts=1)
    shutil.rmtree(out, ignore_errors=True)


def engine(rng: Hostile, folder: Path) -> None:
    """What a server with OpenAI's API answers to `audit`, `bench` and `tune`."""
    from outrider.engines import Query, open_engine

    logprob = {"token": "a", "logprob": -0.1, "top_logprobs": [{"token": "a", "logprob": -0.1}]}
    choice = {
        "index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "a"},
        "logprobs": {"content": [logprob, logprob]},
    }  # fmt: skip
    more = {"id": "1", "created": 1, "model": "m", "usage": {"completion_tokens": 2}}
    pages = {
        "/v1/models": {"object": "list", "data": [{"id": "m", "object": "model"}]},
        "/v1/chat/completions": {**more, "object": "chat.completion", "choices": [choice]},
        "/get_server_info": INFO,
    }
    with refusal(Unsupported), redirect_stderr(io.StringIO()):
        found = open_engine(_served(rng, pages))
        found.facts()
        found.counts()
        (answer,) = found.ask([Query("a", chat=True, max_tokens=3, logprobs=1)])
        if not isinstance(answer.text, str) or not isinstance(answer.count, int):
            raise Broken(f"an answer that is none: {answer!r:.200}")


def doctor_server(rng: Hostile, folder: Path) -> None:
    """What a server answers to `outrider doctor --url`."""
    from outrider.doctor.pair import Plan
    from outrider.doctor.run import run

    pages = {"/model_info": {"model_path": "/somewhere/target"}, "/server_info": INFO}
    if rng.random() < 0.3:
        model = {"id": "m", "root": "m", "owned_by": "vllm", "max_model_len": 512}
        pages = {"/v1/models": {"data": [model]}, "/version": {"version": "0.32.0"}}
    with refusal(Unsupported), terminal():
        url = _served(rng, pages)
        run(None, None, url, Plan(), 8.0, rng.random() < 0.5, rng.random() < 0.3)


def reports(rng: Hostile, folder: Path) -> None:
    """Pages and terminal output of `audit` and `bench`, made of what models and servers say."""
    from rich.console import Console

    from outrider.audit import page as audit_page
    from outrider.audit import run as audit_run
    from outrider.audit.result import Heard, Result, Settings
    from outrider.bench import page as bench_page
    from outrider.bench import result as bench_result
    from outrider.bench import run as bench_run
    from outrider.bench.measure import Parity, Plan, Run
    from outrider.engines import Answer, Token

    def said(first: str) -> Answer:
        words = [first, *(rng.text() for _ in range(5))]
        tokens = tuple(Token(w, -0.1, ((w, -0.1), (rng.text(), -0.2))) for w in words)
        return Answer("".join(words), tokens, len(words), rng.text(), ((0.0, 0.0), (1.0, 6.0)))

    facts = {"engine": f"http://h:1/{rng.text()}", "model": rng.text(), "version": rng.text()}
    made = {"date": rng.text(), "argv": [rng.text()], "versions": {rng.text(): rng.text()}}
    answers = [said(rng.text()) for _ in range(3)]
    plain = dict(enumerate(answers))
    heard = Heard(plain, plain, {**plain, 0: said("other")})
    asked = [rng.text() for _ in answers]
    engines = {"plain": facts, "speculative": facts | {"engine": rng.text()}}
    stopped = rng.choice((None, rng.text()))
    audit = Result(Settings(), asked, (), heard, engines, made, stopped=stopped)
    plan = Plan({"texts": asked}, (1,))
    (cell,) = plan.cells
    runs = [Run(e, cell, 0, 2.0 + e, 6, (0.1,), (0.1,), None) for e in (0, 1)]
    bench = bench_result.Result(made, [facts, engines["speculative"]], plan, runs)
    bench.parities[cell, 1] = Parity(3, 2, rng.choice(((), (rng.text(),))))
    look_at(audit_page.page(audit))
    look_at(bench_page.page(bench))
    with terminal():
        audit_run.show(audit, Console(width=100))
        bench_run.show(bench, Console(width=100))


DOORS: dict[str, Door] = {
    door.__name__: door
    for door in (
        custom_params, profile, prompts, bench_results, trial_parts,
        heads, drafts, doctor, explain, engine, doctor_server, reports,
    )
}  # fmt: skip
