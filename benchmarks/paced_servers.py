"""The servers of paced_sglang.py: one for each contender, of which one works at a time."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common_sglang import Suspendable, end_servers_at_sigterm
from paced.clock import now
from paced.device import Pass
from paced.log import finished_log, steady, virtual
from paced.model import FLAGS, HEADED, write_head, write_model
from paced.plugin import PLUGIN, VARIABLE
from paced.texts import Prompt

PREFILL_ROW = 2e-6
"""Seconds a token: less than a GPU needs, because prompts are not part of what is measured."""


@dataclass(frozen=True)
class Contender:
    """A server.

    profile: of Outrider; None for bare SGLang
    draft_model, head: what --speculative-draft-model-path names; with both, the profile names the
        head
    stock: whether Outrider runs on a backend of SGLang's, which reads a request's cache for each
        row of a decode batch; on its own backend, once for all of them
    paths: where another Outrider than this one is installed, and the site of its tests
    price_device_work: whether a GPU's work between passes is taken out of the server's clock
    """

    flags: tuple[str, ...] = ()
    profile: dict[str, Any] | None = None
    draft_model: bool = False
    head: bool = False
    stock: bool = False
    paths: tuple[str, ...] = ()
    price_device_work: bool = True


class Paced(Suspendable):
    """A server on the paced device. passes: the device's log."""

    passes: Path


@contextmanager
def servers(
    device: str,
    contenders: dict[str, Contender],
    flags: Sequence[str],
) -> Iterator[dict[str, Paced]]:
    """Start the contenders' servers. All are suspended.

    device: name of a cost profile
    flags: of all servers, their sizes among them
    """
    end_servers_at_sigterm()
    folder = Path(tempfile.mkdtemp(prefix="outrider-paced-"))
    print(f"logs are in {folder}")
    with_head = any(contender.head for contender in contenders.values())
    model = write_model(folder / "model", HEADED if with_head else 1)
    with ExitStack() as stack:
        running: dict[str, Paced] = {}
        for name, contender in contenders.items():
            running[name] = _start(name, contender, device, model, folder, flags)
            stack.callback(running[name].stop)
            for before in list(running.values())[-2:-1]:  # two load at a time
                before.wait().suspend()
        list(running.values())[-1].wait().suspend()
        yield running


def _start(
    name: str, contender: Contender, device: str, model: Path, folder: Path, common: Sequence[str]
) -> Paced:
    stem = name.replace(" ", "-").replace(",", "")
    passes = folder / f"{stem}.passes.jsonl"
    setting = {
        "profile": device,
        "log": str(passes),
        "prefill_row": PREFILL_ROW,
        "reads_each_row": contender.stock,
        "price_device_work": contender.price_device_work,
    }
    if contender.paths and not can_price(contender.paths):
        del setting["price_device_work"]
    (folder / f"{stem}.device.json").write_text(json.dumps(setting))
    environment = {VARIABLE: str(folder / f"{stem}.device.json"), "OMP_NUM_THREADS": "1"}
    if contender.paths:
        own = [*contender.paths, os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, own))
    flags = [*FLAGS, *common, *contender.flags]
    if contender.profile is None:
        environment["SGLANG_PLUGINS"] = PLUGIN
        flags += ["--attention-backend", "torch_native"]
    else:
        profile = contender.profile
        if contender.head and contender.draft_model:
            drafters = profile.get("drafters", {})
            own = {"path": str(write_head(folder / "head")), **drafters.get("eagle3", {})}
            profile = {**profile, "drafters": {**drafters, "eagle3": own}}
        (folder / f"{stem}.yaml").write_text(json.dumps(profile))
        environment["OUTRIDER_CONFIG"] = str(folder / f"{stem}.yaml")
        backend = "torch_native" if contender.stock else "outrider"
        flags += ["--attention-backend", backend, "--speculative-algorithm", "OUTRIDER"]
    if contender.draft_model or contender.head:
        path = model if contender.draft_model else write_head(folder / "head")
        flags += ["--speculative-draft-model-path", str(path)]
    server = Paced(model, *flags, log=folder / f"{stem}.log", **environment)
    server.passes = passes
    return server


def can_price(paths: Sequence[str]) -> bool:
    """Say whether the paced device of another Outrider knows `price_device_work`.

    paths: see `Contender`
    """
    plugin = Path(paths[-1]).parent / "paced" / "plugin.py"
    return "price_device_work" in plugin.read_text()


def ask(
    server: Paced,
    asked: list[Prompt],
    batch: int,
    tokens: int,
    custom_params: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Let a server answer a batch. Return what the device's log says of it."""
    passes, seconds = run(server, asked, batch, tokens, custom_params)
    return {**steady(passes, batch).summary(batch), "request_seconds": round(seconds, 3)}


def run(
    server: Paced,
    asked: list[Prompt],
    batch: int,
    tokens: int,
    custom_params: dict[str, Any] | None = None,
) -> tuple[list[Pass], float]:
    """Let a server answer a batch. Return the device's passes, and how long the answers took.

    Both are by the server's clock.
    """
    tokens = min(tokens, *(len(prompt.output) for prompt in asked))
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    if custom_params:
        params["custom_params"] = custom_params
    body = {"input_ids": [prompt.ids for prompt in asked], "sampling_params": params}
    server.resume()
    since = now()
    response = server.post("/generate", body, timeout=1800)
    until = now()
    assert response.ok, f"{response.status_code}: {response.text[:500]}"
    passes = finished_log(server.passes, since)
    server.suspend()
    on_server = virtual(passes)
    seconds = on_server(until) - on_server(since)
    for number, (prompt, answer) in enumerate(zip(asked, response.json(), strict=True)):
        if answer["output_ids"] != prompt.output[:tokens]:
            raise SystemExit(
                f"{server.log}: answer {number} of {batch} ({prompt.kind}) is not the recorded "
                "text. No speed is said."
            )
    return passes, seconds
