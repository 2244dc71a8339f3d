"""Two models beside each other: whether hosts take them, what a draft costs, how far it reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from outrider.checkpoint import BYTES
from outrider.doctor.finding import Finding, size
from outrider.doctor.model import Model

__all__ = ["Cost", "Plan", "check_attention", "check_context", "check_cost", "check_kind"]

MOST = 1 / 4
"""A draft that costs more than this share of the target seldom pays."""

LIKELY = 0.8
"""An acceptance that a good draft model reaches on code and chat, to give an example."""

# a cache of their own for sliding layers: `is_hybrid_swa_model` of SGLang 0.5.11
_HYBRID_WINDOWS = ("Llama4", "GptOss", "MiMoV2", "Step3p5", "Gemma4")
# of these, the ones that also attend to learned sinks, which Outrider's attention lacks
_SINKS = ("GptOss", "MiMoV2")
_ATTENTION = {"full_attention", "sliding_attention"}
_STATES = (
    "ssm_state_size",
    "state_size",
    "mamba_d_state",
    "linear_attn_config",
    "linear_num_key_heads",
    "hybrid_override_pattern",
    "layers_block_type",
    "conv_L_cache",
)


@dataclass(frozen=True)
class Plan:
    """What is to be served.

    requests: at once
    context: the longest of them, prompt and answer; None if the user did not say
    dtype: of weights and cache; None is each model's own
    tp: GPUs that share the models
    drafts: K, the most drafts in a step
    weighed: drafts in a step whose cost is shown; None is K
    draft_bits: 4 or 8, the draft's weights in so few bits (CPU)
    """

    requests: int = 8
    context: int | None = None
    dtype: str | None = None
    tp: int = 1
    drafts: int = 4
    weighed: int | None = None
    draft_bits: int | None = None

    def computes_in(self, model: Model) -> str:
        """Return the dtype of a model's cache and activations."""
        said = self.dtype or model.dtype
        return said if said in BYTES else "bfloat16"

    def loads_as(self, model: Model) -> str | None:
        """Return the dtype of a model's weights; None where they stay packed as they are."""
        return None if model.quantized else self.computes_in(model)

    def length(self, target: Model) -> int:
        """Return how long requests are: at most 4096 if nobody said."""
        return self.context or min(4096, target.context or 4096)


@dataclass(frozen=True)
class Cost:
    """What a step costs, in passes of the target over one row a request.

    draft: one pass of the draft
    verify: one pass of the target over K + 1 rows: more than 1 if experts differ from row to row
    """

    draft: float
    verify: float
    drafts: int

    @property
    def step(self) -> float:
        """What a step with all drafts costs."""
        return self.verify + self.drafts * self.draft

    def speedup(self, acceptance: float) -> float:
        """Return tokens per step over a step's cost, if each draft is accepted so likely."""
        if acceptance == 1:
            return (self.drafts + 1) / self.step
        # the sum of acceptance**i, i from 0 to K
        return (1 - acceptance ** (self.drafts + 1)) / (1 - acceptance) / self.step

    @property
    def break_even(self) -> float | None:
        """The acceptance above which it is faster than plain decoding; None if it never is."""
        if self.speedup(1.0) <= 1:
            return None
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if self.speedup(middle) >= 1 else (middle, high)
        return high

    @staticmethod
    def of(target: Model, draft: Model, plan: Plan, bits: int | None) -> Cost | None:
        """Return the cost by the bytes of weights that passes read, None if they are not known."""
        dtype, rows = plan.loads_as(target), plan.requests
        drafts = plan.drafts if plan.weighed is None else plan.weighed
        plain = target.bytes_read(dtype, rows)
        verify = target.bytes_read(dtype, rows * (drafts + 1))
        drafted = draft.bytes_read(plan.loads_as(draft), rows, bits)
        if not plain or verify is None or drafted is None:
            return None
        return Cost(drafted / plain, verify / plain, drafts)

    def as_json(self) -> dict[str, Any]:
        """Return it with what follows from it."""
        return {
            "ratio": self.draft,
            "verify": self.verify,
            "drafts": self.drafts,
            "step": self.step,
            "break_even_acceptance": self.break_even,
            f"speedup_at_{LIKELY}": self.speedup(LIKELY),
        }


def check_kind(model: Model) -> Iterator[Finding]:
    """Say what of a model is not served, as the hosts themselves would when they start."""
    config = model.config
    name = f"{model.name}: {', '.join(model.architectures) or config.get('model_type')}"
    kinds = set(config.get("layer_types") or ()) - _ATTENTION
    if config.get("attention_chunk_size"):  # Llama 4, whose config.json names no layer types
        kinds.add("chunked_attention")
    fix = "choose a decoder-only model with full attention"
    if model.whole.get("is_encoder_decoder"):
        yield Finding("models", "problem", f"{name} has an encoder", "both hosts refuse it", fix)
    elif kinds or any(config.get(key) for key in _STATES):
        what = f"{name} has {', '.join(sorted(kinds)) or 'state-space'} layers"
        why = "hosts serve full and sliding-window attention"
        why += "" if kinds == {"chunked_attention"} else ": a state cannot forget rejected drafts"
        yield Finding("models", "problem", what, why, fix)
    elif any(one.startswith(_SINKS) for one in model.architectures):
        why = "in SGLang the server stops; with Transformers it is refused"
        yield Finding("models", "problem", f"{name} has attention sinks", why, fix)
    elif any(one.startswith(_HYBRID_WINDOWS) for one in model.architectures):
        yield Finding(
            "models",
            "warning",
            f"{name} has sliding-window layers with a cache of their own in SGLang",
            "in SGLang the server stops",
            "try Transformers, or use another model",
        )
    elif "vision_config" in model.whole or "audio_config" in model.whole:
        yield Finding(
            "models",
            "warning",
            f"{name} takes more than text",
            "in SGLang the server stops; with Transformers only text was tried",
            "choose the text model of the family",
        )
    elif config.get("kv_lora_rank"):
        yield Finding(
            "models",
            "warning",
            f"{name} has latent attention (MLA)",
            "Outrider was not run with it: what its cache takes is not known, and the attention "
            "backend 'outrider' refuses it",
            "try it with another --attention-backend, and compare answers: outrider audit",
        )
    elif model.tensors is not None:
        total = model.bytes_loaded()
        assert total is not None
        how = "packed weights" if model.quantized else model.dtype
        yield Finding("models", "ok", f"{name}, {len(model.loaded)} tensors, {how}, {size(total)}")


def check_attention(model: Model, in_sglang: bool) -> Iterator[Finding]:
    """Ask the installed Transformers whether our attention can replace the model's own.

    in_sglang: whether SGLang, which has classes of its own, may serve the model instead
    """
    try:
        import transformers

        found = {name: getattr(transformers, name, None) for name in model.architectures}
    except Exception:  # whatever its imports raise: then nothing is known
        return
    for name, kind in found.items():
        if not getattr(kind, "_supports_attention_backend", True):
            yield Finding(
                "hosts",
                "warning" if in_sglang else "problem",
                f"{model.name}: {name} is refused with Transformers",
                "its attention does not go through Transformers' AttentionInterface",
                "serve it with SGLang, or choose another model",
            )


def check_cost(target: Model, draft: Model, plan: Plan, on_cpu: bool) -> Iterator[Finding]:
    """Compare what passes read, and say from which acceptance on drafting pays."""
    cost = Cost.of(target, draft, plan, plan.draft_bits)
    if plan.draft_bits and not on_cpu:
        yield Finding(
            "cost",
            "problem",
            f"draft_bits {plan.draft_bits} on a GPU",
            "the server stops: the packed product is for CPU",
            "load a quantized draft model; SGLang runs it with kernels made for it",
        )
    if cost is None:
        what = "the cost of a draft is not known"
        yield Finding("cost", "note", what, "it takes the weights of both models", "add them")
        return
    bits = f" in {plan.draft_bits} bits" if plan.draft_bits else ""
    mine = target.bytes_read(plan.loads_as(target), plan.requests) or 0.0
    what = (
        f"a pass of the draft reads {size(cost.draft * mine)}{bits}, one of the target "
        f"{size(mine)}: 1:{1 / cost.draft:.1f}"
    )
    verify = f"{cost.verify:.2f}" if cost.verify > 1.005 else "1"
    why = f"K = {cost.drafts} drafts and their check cost {verify} + {cost.drafts} x "
    why += f"{cost.draft:.2f} = {cost.step:.2f} passes of the target"
    if cost.break_even is None:
        why += ", more than the tokens they can bring: slower than plain decoding"
    else:
        why += f": drafting pays above an acceptance of {cost.break_even:.2f}; at {LIKELY} it is "
        why += f"{cost.speedup(LIKELY):.2f}x plain decoding, at best"
    if cost.draft <= MOST and cost.break_even is not None:
        yield Finding("cost", "ok", what, why)
    else:
        yield Finding(
            "cost",
            "warning",
            f"{what}, above 1:{1 / MOST:.0f}",
            why,
            _cheaper(target, draft, plan, on_cpu),
        )
    if cost.verify > 1.05:
        visited, of = target.experts or (1, 1)
        yield Finding(
            "cost",
            "note",
            f"a token visits {visited} of {of} experts: checking K + 1 rows reads "
            f"{cost.verify:.2f} times what one row reads",
            "with experts a wider pass is not free, as it nearly is for a dense model",
            "fewer drafts for small batches; drafter: adaptive measures and decides",
        )


def _cheaper(target: Model, draft: Model, plan: Plan, on_cpu: bool) -> str:
    ways = ["choose a smaller draft, or n-grams, which cost nothing"]
    if on_cpu and not plan.draft_bits and not draft.quantized:
        few = Cost.of(target, draft, plan, 4)
        if few is not None and few.draft <= MOST:
            ways.insert(0, f"set draft_bits: 4, which makes it 1:{1 / few.draft:.1f}")
    ways.append("drafter: adaptive, SGLang's default, measures, and drafts where it pays")
    return "; ".join(ways)


def check_context(
    target: Model, draft: Model | None, plan: Plan, in_sglang: bool
) -> Iterator[Finding]:
    """Compare how far the models read. in_sglang: whether that is the host."""
    own, wanted = target.context, plan.context or target.context
    if own is None or wanted is None:
        yield Finding("context", "note", f"config.json of {target.name} names no longest sequence")
        return
    if wanted > own:
        yield Finding(
            "context",
            "problem",
            f"--context-length {wanted:,} in a target of {own:,} positions",
            "no host serves beyond a model's own limit",
            f"at most --context-length {own}",
        )
        return
    reads = None if draft is None else draft.context
    if reads is None:
        yield Finding("context", "ok", f"the target reads {own:,} positions")
    elif reads >= wanted:
        what = f"the target reads {own:,} positions, the draft {reads:,}"
        yield Finding("context", "ok", what + (f"; {wanted:,} wanted" if plan.context else ""))
    else:
        yield Finding(
            "context",
            "problem" if in_sglang else "warning",
            f"the draft reads {reads:,} positions, {wanted:,} are wanted",
            "SGLang stops at start; Transformers drafts up to there, and decodes plainly beyond",
            f"serve with --context-length {reads}, or choose a draft that reads as far",
        )
