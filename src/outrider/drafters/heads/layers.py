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


@dataclass(frozen=True)
class HeadConfig:
    """The shape of a head, from its config.json.

    theta, scaling: of the rotary embedding; `scaling` as Transformers writes it, {} without
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
    attention_bias: bool = False

    @staticmethod
    def of(found: dict[str, Any]) -> HeadConfig:
        """Read a config.json of Llama's family."""
        act = found.get("hidden_act", "silu")
        if act != "silu":
            raise Unsupported(f"a head with hidden_act {act!r}", fix="heads use silu")
        rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
        heads = found["num_attention_heads"]
        return HeadConfig(
            hidden_size=found["hidden_size"],
            intermediate_size=found["intermediate_size"],
            num_heads=heads,
            num_kv_heads=found.get("num_key_value_heads") or heads,
            head_dim=found.get("head_dim") or found["hidden_size"] // heads,
            norm_eps=found.get("rms_norm_eps", 1e-6),
            theta=rope.get("rope_theta") or found.get("rope_theta", 10_000.0),
            scaling=rope,
            max_length=found.get("max_position_embeddings", 2048),
            vocab_size=found["vocab_size"],
            draft_vocab_size=found.get("draft_vocab_size") or found["vocab_size"],
            attention_bias=bool(found.get("attention_bias", False)),
        )


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised rows."""
        wide = x.float()
        return self.weight * (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(
            x.dtype
        )


def frequencies(config: HeadConfig) -> Tensor:
    """Return the angle that each pair of dimensions turns by per position, [head_dim / 2]."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
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


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn [N, heads, D] by angles, [N, D / 2]: dimension i pairs with i + D / 2."""
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
        self.q_proj = nn.Linear(inputs, wide, bias=bias)
        self.k_proj = nn.Linear(inputs, narrow, bias=bias)
        self.v_proj = nn.Linear(inputs, narrow, bias=bias)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=False)

    def forward(self, x: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        """Return [N, H]."""
        shape = (len(x), -1, self.config.head_dim)
        q = rotate(self.q_proj(x).view(shape), angles)
        k = rotate(self.k_proj(x).view(shape), angles)
        v = self.v_proj(x).view(shape)
        found: Tensor = self.o_proj(attend(self.layer, q, k, v).reshape(len(x), -1))
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
