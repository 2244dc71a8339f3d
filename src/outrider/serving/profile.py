"""What a user can set: one YAML file for the server, a few words in a request.

What SGLang has a flag for stays there: the draft model, and the most drafts in a step
(`--speculative-num-steps`).
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Optional

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.core import Unsupported, is_whole
from outrider.errors import one_line

CONFIG_VARIABLE = "OUTRIDER_CONFIG"
"""The environment variable that names the profile: it reaches `sglang.Engine` too."""

REPAIR_VARIABLE = "OUTRIDER_REPAIR"
"""The environment variable that asks for a repair of SGLang's own speculation."""

ROCM_SAMPLING = "rocm-sampling"
"""The one repair there is: sampled requests are sampled on ROCm too."""

REQUEST_KEY = "outrider"
"""Where a request's own options are, within its `custom_params`."""

MODEL = "model"
"""The drafter that runs SGLang's draft model."""

ADAPTIVE = "adaptive"
"""The drafter that chooses among the others, and how much, by measured goodput."""

DEVICE = "device"
"""Prompt lookup on the device: its steps are launched before the last one is known."""

LOOKUP = {"min_n": 1, "max_n": 8}
"""Of the lookup on the device, unless the profile says otherwise. A row costs little where it is
used, so that drafts after a match of one token pay too."""

LONGEST_PROFILE = 1 << 16
"""Bytes that a profile may have."""

DEEPEST = 32
"""Brackets within each other that a profile may have."""

HEAD_OPTIONS = ("path", "kind")
"""Options that make a drafter a head: where it is, and what to read among the target's weights."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Profile(_Strict):
    """How the server drafts.

    drafter: the one for requests that name none. The default is `adaptive`: in every step it
        chooses between lookups in the text, the draft model or head if there is one, and plain
        decoding, by measured goodput. A fixed drafter drafts even where plain decoding is faster.
    drafters: options for drafters, by name. A request may choose among these, the default, `ngram`,
        `none`, and the draft model (`model`) or head (its kind, as `eagle3`) if there is one. An
        entry with a `path` is a further head, in that directory, under a name of your choice. With
        `kind: mtp` and no path it is the MTP layer among the target's own weights.
    max_drafts: the most drafts in a step for requests that do not say; also the server's limit, if
        `--speculative-num-steps` does not set one
    draft_bits: 4 or 8: the draft model reads a copy of its weights in so few bits, where that is
        faster. On CPU; elsewhere load a quantized draft model.
    draft_timeout: seconds after which a step goes on without drafts of a drafter that another
        package brings. Our own lookups take microseconds, and a draft model runs where the target
        runs.
    report_acceptance: whether answers say how many drafts of a request were accepted
    flush_tokens: streamed answers come in chunks of exactly so many tokens, the last one apart;
        without it, in what each step gave
    verify_pass: how drafts are verified. `rows`: as a decode batch, which computes what plain
        decoding computes. `target_verify`: by SGLang's own pass, which reads each request's cache
        once on every backend, but gives other bits. `auto`: control chooses by measured times;
        rows without it. By default `auto` with fa3, flashinfer, triton and aiter unless
        `--enable-deterministic-inference` is given, else `rows`. A model with sliding windows has
        `rows` with all backends but fa3.
    tracing: whether each step is sent as an OpenTelemetry span, as the variables OTEL_* say
    sanitize: whether every KV slot that is read is checked to hold its reader's text, and the
        server stops if one does not. For tests: it is slow. SGLang without speculation is checked
        too.
    """

    drafter: str = ADAPTIVE
    drafters: dict[str, dict[str, Any]] = Field(default_factory=dict)
    # pydantic reads Optional at run time, on Python 3.10 too
    max_drafts: Optional[int] = Field(default=None, ge=0)  # noqa: UP045
    draft_bits: Optional[Literal[4, 8]] = None  # noqa: UP045
    draft_timeout: float = Field(default=1.0, gt=0)
    report_acceptance: bool = True
    flush_tokens: Optional[int] = Field(default=None, ge=1)  # noqa: UP045
    verify_pass: Optional[Literal["rows", "target_verify", "auto"]] = None  # noqa: UP045
    tracing: bool = False
    sanitize: bool = False

    def names(self, draft: str | None) -> list[str]:
        """Return the drafters that a request may choose.

        draft: the kind of draft model that the server has, if any: see `heads.draft_kind`
        """
        ours = [draft] if draft else []
        wanted = [self.drafter, *self.drafters, "ngram", *ours, "none"]
        return list(dict.fromkeys(wanted))

    def depths(self) -> dict[str, int]:
        """Return how many drafts drafters make in every step, if they make as many in all."""
        asked = {name: options.get("depth", 0) for name, options in self.drafters.items()}
        return {name: depth for name, depth in asked.items() if is_whole(depth, 1)}

    def head_names(self) -> list[str]:
        """Return the names of heads among the drafters."""
        return [name for name, o in self.drafters.items() if not o.keys().isdisjoint(HEAD_OPTIONS)]


class RequestOptions(_Strict):
    """What one request asks for, in `custom_params: {"outrider": {...}}`.

    max_drafts: at most so many drafts in a step; 0 is plain decoding
    drafter: the one that drafts
    explain: whether `meta_info["outrider_steps"]` lists what each decode step did
    """

    max_drafts: Optional[int] = Field(default=None, ge=0)  # noqa: UP045
    drafter: Optional[str] = None  # noqa: UP045
    explain: bool = False


def load_profile(path: str | None = None) -> Profile:
    """Return the profile at this path, by default the one that $OUTRIDER_CONFIG names."""
    path = path or os.environ.get(CONFIG_VARIABLE)
    return _load(path) if path else Profile()


class _Loader(yaml.SafeLoader):
    """Reads what the file holds, in a time that grows with its size.

    An alias may stand for more than fits into memory. YAML's scanner looks at all open brackets
    for each token.
    """

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level == DEEPEST:
            raise ValueError(f"more than {DEEPEST} brackets within each other")
        super().fetch_flow_collection_start(token)

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            where = self.peek_event().start_mark.line + 1
            raise ValueError(f"line {where}: write the value out, profiles have no aliases")
        return super().compose_node(parent, index)


@lru_cache(maxsize=4)
def _load(path: str) -> Profile:
    try:
        with Path(path).open("rb") as file:
            read = file.read(LONGEST_PROFILE + 1)
        if len(read) > LONGEST_PROFILE:
            raise ValueError(f"it is larger than {LONGEST_PROFILE:,} bytes")
        content = yaml.load(read.decode(), _Loader) or {}
        return Profile.model_validate(content)
    except ValidationError as error:
        raise Unsupported(f"profile {path}", fix=_say(error)) from error
    # YAML's own types raise ValueError: a date of month 99
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise Unsupported(f"profile {path}", fix=f"it cannot be read: {error}") from error


def repair_wanted() -> bool:
    """Say whether $OUTRIDER_REPAIR asks for a repair. Raises Unsupported if there is none such."""
    wanted = os.environ.get(REPAIR_VARIABLE, "")
    if wanted not in ("", ROCM_SAMPLING):
        raise Unsupported(
            f"{REPAIR_VARIABLE}={wanted:.80}", fix=f"set it to {ROCM_SAMPLING}, or unset it"
        )
    return bool(wanted)


def request_options(
    custom_params: Any, drafters: list[str], reports: bool = True
) -> RequestOptions:
    """Return what the request asks of Outrider. Raises ValueError if it cannot be had.

    drafters: those that the server has
    reports: whether the server says what was accepted
    """
    if not isinstance(custom_params, dict) or REQUEST_KEY not in custom_params:
        return RequestOptions()
    try:
        options = RequestOptions.model_validate(custom_params[REQUEST_KEY])
    except ValidationError as error:
        raise ValueError(f"custom_params.{REQUEST_KEY}: {_say(error)}") from None
    if options.drafter is not None and options.drafter not in drafters:
        raise ValueError(
            f"custom_params.{REQUEST_KEY}.drafter: {options.drafter!r:.80} is not among this "
            f"server's drafters: {', '.join(drafters)}"
        )
    if options.explain and not reports:
        raise ValueError(
            f"custom_params.{REQUEST_KEY}.explain: this server does not report acceptance"
        )
    return options


def _say(error: ValidationError) -> str:
    """Return what is wrong and where, in one line, without the value."""
    return one_line(
        "; ".join(
            ".".join([*map(str, e["loc"])] or ["it"])[:80] + ": " + e["msg"]
            for e in error.errors(include_url=False, include_input=False)[:3]
        )
    )
