"""What a running server says of itself: SGLang in full, others by OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from outrider.checkpoint import BYTES
from outrider.clients import base_url
from outrider.clients.http import Client, Limits
from outrider.clients.replies import ModelList, Name, Reply
from outrider.doctor.finding import Finding
from outrider.doctor.known_bad import OURS, OWN
from outrider.doctor.model import Model
from outrider.doctor.pair import Plan
from outrider.errors import OTHER_FORM, Unsupported

__all__ = ["Served", "ask", "check_server"]

PAGE = Limits(seconds=20.0)
"""What a page of facts may take."""

NO_OBJECT = ("json_invalid", "model_type", "model_attributes_type")
"""What pydantic calls a page that is no JSON object."""

NAMES = {"sglang": "SGLang", "vllm": "vLLM"}


Tokens = Annotated[int, Field(ge=0, le=2**40)]
Threshold = Annotated[float, Field(ge=0, le=1)]
Page = TypeVar("Page", bound=Reply)


class _ModelInfo(Reply):
    """SGLang's /model_info."""

    model_path: Name = ""


class _Version(Reply):
    """vLLM's /version."""

    version: Name | None = None


class _Arguments(Reply):
    """SGLang's /server_info: its arguments, with what its scheduler says.

    Those that are not here are looked at only to see whether they are set.
    """

    model_config = ConfigDict(extra="allow")

    version: Name | None = None
    served_model_name: Name | None = None
    speculative_algorithm: Name | None = None
    speculative_num_steps: Annotated[int, Field(ge=0, le=10_000)] | None = None
    speculative_draft_model_path: Name | None = None
    speculative_accept_threshold_single: Threshold | None = None
    speculative_accept_threshold_acc: Threshold | None = None
    attention_backend: Name | None = None
    device: Name | None = None
    dtype: Name | None = None
    enable_deterministic_inference: bool | None = None
    tp_size: Annotated[int, Field(ge=1, le=10_000)] | None = None
    context_length: Tokens | None = None
    max_total_num_tokens: Tokens | None = None
    max_running_requests: Tokens | None = None


@dataclass(frozen=True)
class Served:
    """A server.

    url: without /v1
    models: what it calls its models: paths and names
    arguments: SGLang's, with what its scheduler says; None for any other server
    versions: of the engine, if it says
    limit: the longest sequence, if it says
    """

    url: str
    models: tuple[str, ...]
    arguments: Mapping[str, Any] | None
    versions: Mapping[str, str]
    limit: int | None = None

    @property
    def draft(self) -> str | None:
        """The path of its draft model."""
        found = (self.arguments or {}).get("speculative_draft_model_path")
        return str(found) if found else None

    @property
    def device(self) -> str | None:
        """Where it runs, as far as it says: ROCm's devices are called cuda too."""
        if self.arguments is None:
            return None
        backend = self.arguments.get("attention_backend")
        return "rocm" if backend in ("aiter", "wave") else str(self.arguments.get("device"))

    def plan(self, plan: Plan) -> Plan:
        """Return the plan as the server carries it out, as far as it says."""
        said = self.arguments or {}
        dtype = said.get("dtype")
        drafts = said.get("speculative_num_steps") or plan.drafts
        return replace(
            plan,
            context=plan.context or self.limit,
            dtype=plan.dtype or (dtype if dtype in BYTES else None),
            tp=said.get("tp_size") or plan.tp,
            drafts=drafts,
            # control verifies as many as pay: its K of 24 is a limit, not what a step has
            weighed=min(drafts, plan.drafts),
        )

    def as_json(self) -> dict[str, Any]:
        """Return what it said, as far as it matters."""
        keys = (
            "speculative_algorithm",
            "speculative_num_steps",
            "attention_backend",
            "device",
            "enable_deterministic_inference",
            "tp_size",
            "context_length",
            "max_total_num_tokens",
            "max_running_requests",
        )
        found = {key: (self.arguments or {}).get(key) for key in keys}
        return {
            "url": self.url,
            "models": list(self.models),
            "draft": self.draft,
            "versions": dict(self.versions),
            "arguments": found if self.arguments is not None else None,
        }


def ask(url: str) -> Served:
    """Ask a server what it serves. Raises Unsupported if none answers, or no model server."""
    client = Client(base_url(url if "://" in url else f"http://{url}").removesuffix("/v1"))
    root = client.shown
    info = _page(client, _ModelInfo, "/model_info", "/get_model_info")
    if info is not None and info.model_path:
        said = _page(client, _Arguments, "/server_info", "/get_server_info") or _Arguments()
        served = [info.model_path, said.served_model_name]
        return Served(
            root,
            tuple(dict.fromkeys(name for name in served if name)),
            said.model_dump(exclude_unset=True),
            {"sglang": said.version} if said.version else {},
            said.context_length,
        )
    listed = _page(client, ModelList, "/v1/models")
    if listed is None:
        raise Unsupported(
            f"what answers at {root} is no model server: neither /model_info nor /v1/models",
            fix="give the address of SGLang, vLLM or another server with OpenAI's API",
        )
    names = [name for one in listed.data for name in (one.id, one.root) if name]
    if not names:
        raise Unsupported(f"{root} serves no model", fix="wait until it has loaded one")
    first, about = listed.data[0], _page(client, _Version, "/version")
    is_vllm = first.owned_by == "vllm" and about is not None and about.version
    versions = {"vllm": str(about.version)} if is_vllm and about is not None else {}
    return Served(root, tuple(dict.fromkeys(names)), None, versions, first.max_model_len)


def _page(client: Client, kind: type[Page], *paths: str) -> Page | None:
    """Return the first of these pages that the server has; None if it has none, or it is no JSON.

    Raises Unsupported if a page has other values than it may have.
    """
    for path in paths:
        response = client.ask(path, None, PAGE)
        if response.status == 200:
            try:
                return kind.model_validate_json(response.body)
            except ValidationError as error:
                if error.error_count() == 1 and error.errors()[0]["type"] in NO_OBJECT:
                    continue
                return response.parsed(kind)  # it raises
    return None


def is_same(model: Model, names: tuple[str, ...]) -> bool:
    """Say whether a server's model is the one whose files were read.

    Names and paths are compared, then, where the server's path can be read here, config.json; at
    last the last part of the path: servers may lie on other machines.
    """
    for name in names:
        if name == model.name:
            return True
        path = Path(name)
        if (config := _config(path)) is not None:
            if config == model.whole or path.resolve() == model.path.resolve():
                return True
        elif path.name.lower() == Path(model.name.rstrip("/")).name.lower():
            return True
    return False


def _config(path: Path) -> Any:
    """Return what stands in config.json of a directory that a server names; None if it is not here.

    What is no JSON is "": a model's is never that.
    """
    try:
        file = path / "config.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (ValueError, RecursionError):
        return ""
    except OSError:  # no path at all, or not for us
        return None


def check_server(
    served: Served, target: Model | None, draft: Model | None, plan: Plan
) -> Iterator[Finding]:
    """Say what a server runs, and how that fits. Raises Unsupported if it serves another model."""
    if target is not None and not is_same(target, served.models):
        raise Unsupported(
            f"{served.url} serves {served.models[0]}, not {target.name}",
            fix="give the model that it serves, or the address of the other server",
        )
    said = [f"{NAMES[name]} {version}" for name, version in served.versions.items()]
    engine = ", ".join(said) or "OpenAI's API"
    yield Finding("server", "ok", f"{served.url} serves {served.models[0]} ({engine})")
    if served.arguments is None:
        yield Finding(
            "server",
            "note",
            "it does not say how it decodes",
            "whether its answers are those of plain decoding shows by asking",
            f"outrider audit PLAIN {served.url}, PLAIN being the engine without speculation",
        )
        return
    yield from _algorithm(served)
    yield from _contract(served)
    if draft is not None and served.draft and not is_same(draft, (served.draft,)):
        yield Finding(
            "server",
            "warning",
            f"its draft model is {served.draft}, not {draft.name}",
            "what was found above is about the other one",
            "leave DRAFT out to look at the server's own",
        )
    yield from _room(served.arguments, target, plan)


def _room(arguments: Mapping[str, Any], target: Model | None, plan: Plan) -> Iterator[Finding]:
    room, most = arguments.get("max_total_num_tokens"), arguments.get("max_running_requests")
    length = plan.length(target) if target else plan.context
    if not room:
        return
    what = f"its cache has room for {room:,} tokens"
    what += f", {room // length} requests of {length:,}" if length else ""
    what += f"; it runs at most {most} at once" if most else ""
    if length is None or room >= plan.requests * length:
        yield Finding("server", "ok", what)
    else:
        yield Finding(
            "server",
            "note" if room >= length else "warning",
            what,
            "others wait, or are taken back and read again"
            if room >= length
            else "a request of this length cannot be served",
            "a larger --mem-fraction-static or --max-total-tokens, or a shorter --context-length",
        )


def _algorithm(served: Served) -> Iterator[Finding]:
    arguments = served.arguments or {}
    name = str(arguments.get("speculative_algorithm") or "").upper()
    if name == OURS:
        drafts = arguments.get("speculative_num_steps")
        who = f"draft model {served.draft}" if served.draft else "no draft model"
        yield Finding("server", "ok", f"OUTRIDER is on: K = {drafts}, {who}")
        if arguments.get("enable_deterministic_inference"):
            what = "deterministic: the tokens of plain SGLang in that mode"
            yield Finding("server", "ok", what)
        else:
            yield Finding(
                "server",
                "note",
                "not deterministic: answers have the distribution of plain SGLang",
                "greedy ones may differ where two logits tie within rounding; sampling_seed does "
                "not count",
                "--enable-deterministic-inference for the same tokens",
            )
        return
    if name:
        what, fix = f"it speculates with SGLang's own {name}", "--speculative-algorithm OUTRIDER"
        why = "its answers may have another distribution than plain ones: see what is known below"
        yield Finding("server", "warning" if name in OWN else "note", what, why, fix)
    else:
        what = "it decodes plainly: no speculation is on"
        yield Finding("server", "note", what, "Outrider is not in use", "outrider serve ...")
    yield from _refused(arguments)


def _refused(arguments: Mapping[str, Any]) -> Iterator[Finding]:
    """Say which of a server's settings Outrider would not start with."""
    from outrider.engines.sglang.arguments.flags import REFUSED

    for refusal in REFUSED:
        # those of SGLang's own speculation go when Outrider takes its place
        if not refusal.fields or any(word in refusal.what for word in ("spec", "eagle")):
            continue
        try:
            refused = refusal.asks(SimpleNamespace(**arguments))
        except OTHER_FORM:  # another SGLang has other settings
            continue
        if refused:
            why = "with OUTRIDER the server would stop at start"
            what = f"{refusal.what} is refused with OUTRIDER"
            yield Finding("server", "warning", what, why, refusal.fix)


def _contract(served: Served) -> Iterator[Finding]:
    from outrider.engines.sglang.versions.contract import CONTRACTS, NEWEST, VERSIONS

    version = served.versions.get("sglang")
    if version is not None and version not in CONTRACTS:
        yield Finding(
            "server",
            "warning",
            f"SGLang {version}; Outrider knows {VERSIONS}",
            "with OUTRIDER it would stop at start",
            f"pip install sglang=={NEWEST}",
        )
