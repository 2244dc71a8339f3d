"""Transformers in this process: its own generation and speculation, and Outrider's."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any, get_args

from outrider.clients.base import (
    Answer,
    Counts,
    Heard,
    OnRefused,
    Query,
    Refused,
    Token,
    said,
)
from outrider.clients.chat import render_chat
from outrider.clients.models import (
    check_drafter,
    check_target,
    draft_kind,
    load_model,
    load_tokenizer,
)
from outrider.engines.exactness import Exactness, current_name
from outrider.errors import Unsupported, UsageError, check_choice

__all__ = ["LocalEngine"]

PLAIN, ASSISTED, LOOKUP, OUTRIDER = MODES = ("plain", "assisted", "lookup", "outrider")
CHOICES: dict[str, tuple[Any, ...]] = {
    "mode": MODES,
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "exactness": get_args(Exactness),
    "draft_bits": (4, 8),
}
OPTIONS = ("draft", "drafter", "max_drafts", *CHOICES)


class _Clock:
    """Notes when tokens come, as a streamer of Transformers. What comes first is the prompt."""

    def __init__(self, started: float) -> None:
        self.arrivals = [(started, 0.0)]
        self._prompt_read = False

    def put(self, tokens: Any) -> None:
        if self._prompt_read:
            self.arrivals.append((time.perf_counter(), self.arrivals[-1][1] + tokens.numel()))
        self._prompt_read = True

    def end(self) -> None:
        """Do nothing: the last tokens came before."""


class LocalEngine:
    """Answers with a model of Transformers.

    mode: `plain` is Transformers' own generate, `assisted` and `lookup` its own speculation (with
        a draft model, by prompt lookup), `outrider` is ours; the last if a draft or drafter is
        named, else plain
    draft: a smaller model; drafter: who drafts instead, by name; max_drafts: K
    dtype: of the weights; exactness: "lossless" or "bitwise"; draft_bits: 4 or 8
    """

    def __init__(self, spec: str, model: str, options: Mapping[str, Any]) -> None:
        if "exactness" in options:
            options = {**options, "exactness": current_name(options["exactness"])}
        _check(spec, options)
        ours = "draft" in options or "drafter" in options
        self.spec = spec
        self.mode = str(options.get("mode", OUTRIDER if ours else PLAIN))
        if self.mode == ASSISTED and "draft" not in options:
            raise UsageError("mode=assisted without a draft model", fix="add draft=MODEL")
        try:
            import torch
            import transformers  # noqa: F401
        except ImportError as error:
            raise Unsupported(
                f"transformers: without it ({error})", fix="pip install 'outrider[transformers]'"
            ) from error
        if "drafter" in options:
            check_drafter(str(options["drafter"]))
        self._torch = torch
        self._options = dict(options)
        self._max_drafts: int = options.get("max_drafts", 8)
        check_target(model)
        self.model = self._load(model)
        self.tokenizer: Any = load_tokenizer(model)
        self._draft = self._load_draft(str(options["draft"])) if "draft" in options else None
        self._quantized: dict[int, Any] = {}
        self._drafter = self._make_drafter() if self.mode == OUTRIDER else None
        self._counts = Counts()

    def _load_draft(self, name: str) -> Any:
        """Return a draft model, or a head, which is loaded when its target is known."""
        kind = draft_kind(name)
        if kind == "model":
            return self._load(name)
        refused = {
            "mode=assisted": self.mode == ASSISTED,
            "draft_bits": "draft_bits" in self._options,
        }
        for what in (what for what, is_so in refused.items() if is_so):
            raise UsageError(f"{what} with the {kind} head {name}", fix="leave it out")
        import outrider

        return outrider.load_drafter(name)

    def _load(self, name: str) -> Any:
        return load_model(name, self._options.get("dtype", "auto"))

    def _make_drafter(self) -> Any:
        import outrider

        named, bits = self._options.get("drafter", "model"), self._options.get("draft_bits")
        if named not in ("model", "adaptive"):
            return str(named)
        draft = self._draft
        if draft is None and named == "model":
            raise UsageError("drafter=model without a draft model", fix="add draft=MODEL")
        if draft is not None and bits is not None:
            if bits not in self._quantized:
                self._quantized[bits] = outrider.quantized_copy(draft, bits)
            draft = self._quantized[bits]
        # one that chooses is kept, for what it learns
        return draft if named == "model" else outrider.adaptive(self.model, draft)

    def ask(
        self,
        queries: Sequence[Query],
        concurrency: int = 1,
        *,
        stream: bool = False,
        rate: float | None = None,
        heard: Heard | None = None,
        refused: OnRefused | None = None,
    ) -> list[Answer]:
        """Return the answers, in order. Transformers' own modes answer one at a time."""
        if rate is not None:
            raise Unsupported("a rate of requests in this process", fix="serve the model")
        size = concurrency if self.mode == OUTRIDER else 1
        fitting = list(self._fitting(queries, refused))
        answers: list[Answer] = []
        for start in range(0, len(fitting), size):
            numbers = fitting[start : start + size]
            few = [queries[n] for n in numbers]
            new = self._ours(few) if self.mode == OUTRIDER else [self._theirs(few[0])]
            for number, answer in zip(numbers, new, strict=True):
                if heard is not None:
                    heard(number, answer)
            answers += new
        return answers

    def _fitting(self, queries: Sequence[Query], refused: OnRefused | None) -> Iterator[int]:
        """Yield the numbers of the queries that fit into the model's context."""
        config = self.model.config.get_text_config()
        most = getattr(config, "max_position_embeddings", None) or 2**31
        for number, query in enumerate(queries):
            length = len(self._ids(query))
            if length + query.max_tokens <= most:
                yield number
                continue
            error = Refused(
                f"{length} + {query.max_tokens} tokens in a model of {most} positions",
                fix="use shorter prompts, or ask for fewer tokens",
            )
            if refused is None:
                raise error
            refused(number, error)

    def _ids(self, query: Query) -> list[int]:
        if not query.chat or self.tokenizer.chat_template is None:
            return list(self.tokenizer.encode(query.prompt))
        messages = [{"role": "user", "content": query.prompt}]
        text = render_chat(self.tokenizer, messages)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    # -- Outrider

    def _ours(self, queries: Sequence[Query]) -> list[Answer]:
        import outrider
        from outrider.core import SamplingParams

        sampling = [
            SamplingParams(
                temperature=query.temperature,
                top_p=query.top_p,
                seed=query.seed,
                max_tokens=query.max_tokens,
                logprobs=query.logprobs,
                ignore_eos=query.ignore_eos,
            )
            for query in queries
        ]
        started = time.perf_counter()
        run = outrider.stream(
            self.model,
            [self._ids(query) for query in queries],
            drafter=self._drafter,
            sampling=sampling,
            max_drafts=self._max_drafts,
            exactness=self._options.get("exactness", "lossless"),
        )
        arrivals = [[(started, 0.0)] for _ in queries]
        before = started
        for event in run:
            now = time.perf_counter()
            for index, outcome in zip(event.indices, event.outcomes, strict=True):
                count = arrivals[index][-1][1] + len(outcome.tokens)
                arrivals[index].append((now, count))
            if before != started:  # the first step reads the prompts
                self._count(event.proposal.num_rows, now - before)
            before = now
        done, stats = run.result, run.result.stats
        self._counts.request_steps += stats.request_steps
        self._counts.emitted += stats.emitted
        self._counts.drafted += stats.drafted
        self._counts.accepted += stats.accepted
        self._counts.accepted_at.update(stats.accepted_at)
        self._counts.proposed_at.update(stats.proposed_at)
        self._counts.fallbacks.update(stats.fallbacks)
        return [
            Answer(
                self.tokenizer.decode(ids, skip_special_tokens=True),
                tuple(self._token(i, n, done.logprobs[r]) for n, i in enumerate(ids)),
                len(ids),
                getattr(done.finish_reasons[r], "value", None),
                tuple(arrivals[r]),
            )
            for r, ids in enumerate(done.outputs)
        ]

    def _count(self, rows: int, seconds: float) -> None:
        """Count a step. Its parts cannot be told apart here."""
        self._counts.steps += 1
        self._counts.rows += rows
        parts: Any = self._counts.seconds  # a Counter of floats
        parts["step"] += seconds

    def _token(self, i: int, n: int, logprobs: Sequence[Any]) -> Token:
        if n >= len(logprobs):
            return Token(self.tokenizer.decode([i]))
        top = tuple((self.tokenizer.decode([t]), value) for t, value in logprobs[n].top)
        return Token(self.tokenizer.decode([i]), logprobs[n].token, top)

    # -- Transformers' own

    def _theirs(self, query: Query) -> Answer:
        torch = self._torch
        ids = torch.tensor([self._ids(query)], device=self.model.device)
        more = {"assistant_model": self._draft} if self.mode == ASSISTED else {}
        if query.seed is not None:
            torch.manual_seed(query.seed)
        clock = _Clock(time.perf_counter())
        with torch.inference_mode():
            done = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=self._config(query),
                streamer=clock,
                **more,
            )
        output = done.sequences[0, ids.shape[1] :].tolist()
        ended = bool(output) and output[-1] in self._ends()
        tokens = [Token(self.tokenizer.decode([i])) for i in output]
        if query.logprobs is not None:
            logprobs = torch.stack([row[0] for row in done.logits]).float().log_softmax(-1)
            top = logprobs.topk(max(1, query.logprobs), dim=-1)
            for n, i in enumerate(output):
                pairs = zip(top.indices[n].tolist(), top.values[n].tolist(), strict=True)
                best = tuple((self.tokenizer.decode([t]), value) for t, value in pairs)
                tokens[n] = Token(tokens[n].text, logprobs[n, i].item(), best)
        return Answer(
            self.tokenizer.decode(output, skip_special_tokens=True),
            tuple(tokens),
            len(output),
            "stop" if ended else "length",
            tuple(clock.arrivals),
        )

    def _config(self, query: Query) -> Any:
        """Return what was asked for and nothing else: models bring penalties of their own."""
        from transformers import GenerationConfig

        more: dict[str, Any] = {}
        if query.temperature > 0:
            more = {"temperature": query.temperature, "top_p": query.top_p, "top_k": 0}
        if self.mode == LOOKUP:
            more["prompt_lookup_num_tokens"] = self._max_drafts
        if self._draft is not None:  # how many is read from the model that drafts
            self._draft.generation_config.num_assistant_tokens = self._max_drafts
        return GenerationConfig(
            max_new_tokens=query.max_tokens,
            min_new_tokens=query.max_tokens if query.ignore_eos else None,
            do_sample=query.temperature > 0,
            eos_token_id=sorted(self._ends()),
            pad_token_id=min(self._ends(), default=0),
            return_dict_in_generate=True,
            output_logits=query.logprobs is not None,
            **more,
        )

    def _ends(self) -> set[int]:
        ends = self.model.generation_config.eos_token_id
        return {ends} if isinstance(ends, int) else set(ends or ())

    # -- about itself

    def variant(self, options: Mapping[str, Any], salt: str | None = None) -> LocalEngine:
        """Return Outrider on the same models, with other options. No prefix is kept here."""
        other = copy(self)
        other.spec = f"{self.spec.partition('#')[0]}#{said(options)}"
        other.mode, other._options = OUTRIDER, {**self._options, **options}
        other._max_drafts = options.get("max_drafts", self._max_drafts)
        other._drafter, other._counts = other._make_drafter(), Counts()
        return other

    def counts(self) -> Counts | None:
        """Return what Outrider's loop did so far; Transformers' own speculation does not tell."""
        return self._counts + Counts() if self.mode == OUTRIDER else None

    def facts(self) -> dict[str, Any]:
        """Return the models, the mode and the version."""
        import transformers

        found = {"engine": self.spec, "model": self.model.config.name_or_path, "mode": self.mode}
        found["version"] = f"transformers {transformers.__version__}"
        found["dtype"] = str(self.model.dtype).removeprefix("torch.")
        return found

    def close(self) -> None:
        """Let the models go."""
        del self.model, self._draft, self._drafter, self._quantized


def _check(spec: str, options: Mapping[str, Any]) -> None:
    """Refuse options that mean nothing, before a model is loaded."""
    where = f"in {spec!r:.200}"
    for key, value in options.items():
        if key not in OPTIONS:
            raise UsageError(f"{key} {where}", fix=f"choose from {', '.join(OPTIONS)}")
        if key in CHOICES:
            check_choice(key, value, CHOICES[key], where=where, error=UsageError)
