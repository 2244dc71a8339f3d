"""What heads are made of: Llama's layers over rows of several sequences.

A pass takes the new tokens of any number of sequences as flat rows. Where their keys and values are
kept is for the host to say, by what it passes as `attend`: a cache for each sequence
(`SequencePass`), or slots of a pool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.core import Unsupported
from outrider.errors import reading

QWEN2 = ("qwen2", "mimo")
"""Model types whose queries, keys and values have a bias that config.json does not mention."""

NEXT = ("qwen3_next", "qwen3_5")
"""Model types with gated attention, norms around 1, and a quarter of the dimensions turned."""


_CHECK = "check its config.json"
_SIZES = (
    *("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    *("max_length", "vocab_size", "draft_vocab_size", "num_layers"),
)


@dataclass(frozen=True)
class HeadConfig:
    """The shape of a head, from its config.json.

    theta, scaling: of the rotary embedding; `scaling` as Transformers writes it, {} without
    rotary_dim: how many dimensions of a head are turned; the others stay
    attention_bias, output_bias: whether the projections to and from attention have a bias
    qk_norm: whether queries and keys are normalised, as in Qwen3
    output_gate: whether attention's output is gated, as in Qwen3-Next: `q_proj` gives the gate too
    norm_offset: added to the weights of norms: 1 where they are kept as a difference to 1
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    theta: float
    scaling: dict[str, Any]
    max_length: int
    vocab_size: int
    draft_vocab_size: int
    num_layers: int = 1
    rotary_dim: int = 0
    attention_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    output_gate: bool = False
    norm_offset: float = 0.0

    def __post_init__(self) -> None:
        if not self.rotary_dim:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        for name in _SIZES:
            size = getattr(self, name)
            if type(size) is not int or not 0 < size < 2**31:
                raise Unsupported(f"a head with {name} {size!r:.80}", fix=_CHECK)
        for name in ("norm_eps", "theta"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise Unsupported(f"a head with {name} {value!r:.80}", fix=_CHECK)
        turned = self.rotary_dim % 2 == 0 and self.rotary_dim <= self.head_dim
        if self.num_heads % self.num_kv_heads or not turned:
            shape = f"{self.num_heads} heads, {self.num_kv_heads} of keys, {self.rotary_dim} turned"
            raise Unsupported(f"a head with {shape}", fix=_CHECK)

    @staticmethod
    def of(found: dict[str, Any]) -> HeadConfig:
        """Read a config.json of Llama's or Qwen's family."""
        act = found.get("hidden_act", "silu")
        if act != "silu":
            raise Unsupported(f"a head with hidden_act {act!r}", fix="heads use silu")
        rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
        heads = found["num_attention_heads"]
        size = found.get("head_dim") or found["hidden_size"] // heads
        kind = str(found.get("model_type", "llama"))
        is_next = kind.startswith(NEXT)
        turned = rope.get("partial_rotary_factor") or found.get("partial_rotary_factor")
        bias = bool(found.get("attention_bias", False))
        return HeadConfig(
            hidden_size=found["hidden_size"],
            intermediate_size=found["intermediate_size"],
            num_heads=heads,
            num_kv_heads=found.get("num_key_value_heads") or heads,
            head_dim=size,
            norm_eps=found.get("rms_norm_eps", 1e-6),
            theta=rope.get("rope_theta") or found.get("rope_theta", 10_000.0),
            scaling=rope,
            max_length=found.get("max_position_embeddings", 2048),
            vocab_size=found["vocab_size"],
            draft_vocab_size=found.get("draft_vocab_size") or found["vocab_size"],
            num_layers=found.get("num_hidden_layers") or 1,
            rotary_dim=int(size * (turned or (0.25 if is_next else 1.0))),
            attention_bias=bias or kind in QWEN2,
            output_bias=bias,
            qk_norm=bool(found.get("use_qk_norm", kind.startswith("qwen3"))),
            output_gate=is_next,
            norm_offset=1.0 if is_next else 0.0,
        )


class RMSNorm(nn.Module):
    """x / rms(x) * (weight + offset), the quotient in float32."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = (
            nn.Parameter(torch.full((size,), 1 - offset)),
            eps,
            offset,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised rows."""
        wide = x.float()
        unit = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        if self.offset:
            return (unit * (self.weight.float() + self.offset)).to(x.dtype)
        return self.weight * unit.to(x.dtype)


@reading("rope_scaling of a head", fix=_CHECK)
def frequencies(config: HeadConfig) -> Tensor:
    """Return the angle that each pair of dimensions turns by per position, [rotary_dim / 2]."""
    pairs = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    plain: Tensor = config.theta**-pairs
    scaling = config.scaling
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return plain
    if kind == "linear":
        return plain / float(scaling["factor"])
    if kind != "llama3":
        raise Unsupported(f"a head with rope type {kind!r}", fix="default, linear or llama3")
    # low frequencies are divided by the factor, high ones stay, those in between are mixed
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    mixed: Tensor = (1 - share) * plain / scaling["factor"] + share * plain
    return mixed


class Rotary(nn.Module):
    """The angles of positions, in float32 whatever the head's dtype.

    A frequency in bfloat16 is off by up to 0.2 %: after 2,000 positions by radians.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies(config), persistent=False)
        self.frequencies: Tensor

    def _apply(self, fn: Any, recurse: bool = True) -> Rotary:
        """Follow the head to its device, and not to its dtype."""
        exact = self.frequencies
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
        self.frequencies = exact.to(self.frequencies.device)
        return self

    def forward(self, positions: Tensor) -> Tensor:
        """Return the angles of positions, [N] -> [N, rotary_dim / 2]."""
        return positions[:, None].float() * self.frequencies


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn [N, heads, D] by angles, [N, R / 2]: dimension i < R / 2 pairs with i + R / 2."""
    turned = 2 * angles.shape[-1]
    if turned < x.shape[-1]:
        return torch.cat([rotate(x[..., :turned], angles), x[..., turned:]], -1)
    cos = torch.cat([angles.cos()] * 2, -1)[:, None].to(x.dtype)
    sin = torch.cat([angles.sin()] * 2, -1)[:, None].to(x.dtype)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Attend(Protocol):
    """Keeps a pass's keys and values, and lets each row look at its past."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what each row finds, [N, heads, D].

        layer: of the head
        q: [N, heads, D]; k, v: [N, kv heads, D]
        """
        ...


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    inputs: width of what it reads; EAGLE-3 reads embedding and state side by side
    layer: its number in the head
    """

    def __init__(self, config: HeadConfig, inputs: int, layer: int = 0) -> None:
        super().__init__()
        self.config, self.layer, bias = config, layer, config.attention_bias
        wide, narrow = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        self.q_proj = nn.Linear(inputs, (1 + config.output_gate) * wide, bias=bias)
        self.k_proj = nn.Linear(inputs, narrow, bias=bias)
        self.v_proj = nn.Linear(inputs, narrow, bias=bias)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=config.output_bias)
        if config.qk_norm:
            size, eps, offset = config.head_dim, config.norm_eps, config.norm_offset
            self.q_norm, self.k_norm = RMSNorm(size, eps, offset), RMSNorm(size, eps, offset)

    def keys_values(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Return what rows are found by and what they give, [N, kv heads, D] each."""
        shape = (len(x), -1, self.config.head_dim)
        k, v = self.k_proj(x).view(shape), self.v_proj(x).view(shape)
        return rotate(self.k_norm(k) if self.config.qk_norm else k, angles), v

    def forward(self, x: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        """Return [N, H]."""
        q = self.q_proj(x).view(len(x), self.config.num_heads, -1)
        gate = None
        if self.config.output_gate:  # of each head first the query, then the gate
            q, gate = q.chunk(2, -1)
        q = rotate(self.q_norm(q) if self.config.qk_norm else q, angles)
        mixed = attend(self.layer, q, *self.keys_values(x, angles))
        if gate is not None:
            mixed = mixed * gate.sigmoid()
        found: Tensor = self.o_proj(mixed.reshape(len(x), -1))
        return found


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        size, wide = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, wide, bias=False)
        self.up_proj = nn.Linear(size, wide, bias=False)
        self.down_proj = nn.Linear(wide, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [N, H]."""
        found: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class DecoderLayer(nn.Module):
    """Llama's layer: h = x + attention(norm(x)), then h + mlp(norm(h)).

    input_norm: whether attention's input is normalised
    """

    def __init__(self, config: HeadConfig, layer: int = 0, input_norm: bool = True) -> None:
        super().__init__()
        size, eps, offset = config.hidden_size, config.norm_eps, config.norm_offset
        if input_norm:
            self.input_layernorm: nn.Module = RMSNorm(size, eps, offset)
        else:
            self.input_layernorm = nn.Identity()
        self.post_attention_layernorm = RMSNorm(size, eps, offset)
        self.self_attn, self.mlp = Attention(config, size, layer), MLP(config)

    def forward(self, x: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        """Return [N, H]."""
        h = x + self.self_attn(self.input_layernorm(x), angles, attend)
        found: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return found


def spread(own: Tensor, d2t: Tensor, vocab_size: int) -> Tensor:
    """Return logits of the draft vocabulary over the target's, -inf for what it lacks, [n, V].

    d2t: [draft vocabulary] draft id i is target id i + d2t[i]
    """
    own = own.float()
    if len(d2t) == vocab_size and not d2t.any():
        return own
    found = own.new_full((len(own), vocab_size), -math.inf)
    found[:, torch.arange(len(d2t), device=own.device) + d2t] = own
    return found


class HeadCache:
    """Keys and values of one sequence in all layers of a head. It grows by doubling.

    length: how many rows are kept
    """

    def __init__(self) -> None:
        self.length = 0
        self._kept: dict[int, Tensor] = {}  # by layer: [2, room, kv heads, D]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put rows, [n, kv heads, D], behind those that are kept. Return all keys and values."""
        start, end = self.length, self.length + len(keys)
        kept = self._kept.get(layer)
        if kept is None or kept.shape[1] < end:
            grown = keys.new_empty((2, max(64, 2 * end), *keys.shape[1:]))
            if kept is not None:
                grown[:, :start] = kept[:, :start]
            kept = self._kept[layer] = grown
        kept[0, start:end], kept[1, start:end] = keys, values
        return kept[0, :end], kept[1, :end]

    def truncate(self, length: int) -> None:
        """Forget the rows beyond this length."""
        self.length = min(self.length, length)

    def fork(self) -> HeadCache:
        """Return a copy, with room for a few rows more."""
        branch = HeadCache()
        branch.length = self.length
        for layer, kept in self._kept.items():
            branch._kept[layer] = kept[:, : self.length + 8].clone()
        return branch


class SequencePass:
    """A pass over sequences that have a cache each. When it is over, `keep` what it appended.

    counts: how many of the rows belong to each cache, in order
    """

    def __init__(self, caches: Sequence[HeadCache], counts: Sequence[int]) -> None:
        self._caches, self._counts = caches, [*counts]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Let each row look at its past: see `Attend`."""
        split = [y.split_with_sizes(self._counts) for y in (q, k, v)]
        return torch.cat(
            [
                causal(q, *cache.append(layer, k, v))
                for cache, q, k, v in zip(self._caches, *split, strict=True)
            ]
        )

    def keep(self) -> None:
        """Count the rows of the pass as read."""
        for cache, count in zip(self._caches, self._counts, strict=True):
            cache.length += count


def causal(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Let the last n rows of a sequence look at themselves and what stands before them.

    q: [n, heads, D]; keys, values: [length, kv heads, D] -> [n, heads, D]
    """
    n, length = len(q), len(keys)
    allowed = None
    if 1 < n < length:
        allowed = torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
    found = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=allowed,
        is_causal=n == length,
        enable_gqa=True,
    )
    return found[0].transpose(0, 1)
