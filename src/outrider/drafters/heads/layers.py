"""What heads are made of: Llama's layers over rows of several sequences, with their own cache.

A pass takes the new tokens of any number of sequences as flat rows. Each sequence has a `HeadCache`
that its rows extend: position i of it holds what a layer computed for the token at position i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


class HeadCache:
    """Keys and values of one sequence in one layer. It grows by doubling."""

    def __init__(self) -> None:
        self.length = 0
        self._kept: Tensor | None = None  # [2, room, kv heads, D]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add rows, [n, kv heads, D]. Return all keys and values."""
        start, end = self.length, self.length + len(keys)
        if self._kept is None or self._kept.shape[1] < end:
            grown = keys.new_empty((2, max(64, 2 * end), *keys.shape[1:]))
            if self._kept is not None:
                grown[:, :start] = self._kept[:, :start]
            self._kept = grown
        self._kept[0, start:end], self._kept[1, start:end] = keys, values
        self.length = end
        return self._kept[0, :end], self._kept[1, :end]

    def truncate(self, length: int) -> None:
        """Forget the rows beyond this length."""
        self.length = min(self.length, length)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    inputs: width of what it reads; EAGLE-3 reads embedding and state side by side
    """

    def __init__(self, config: HeadConfig, inputs: int) -> None:
        super().__init__()
        self.config, bias = config, config.attention_bias
        wide, narrow = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        self.q_proj = nn.Linear(inputs, wide, bias=bias)
        self.k_proj = nn.Linear(inputs, narrow, bias=bias)
        self.v_proj = nn.Linear(inputs, narrow, bias=bias)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=False)

    def forward(
        self, x: Tensor, angles: Tensor, caches: Sequence[HeadCache], counts: Sequence[int]
    ) -> Tensor:
        """Return [N, H]. counts: how many of the rows belong to each cache, in order"""
        shape = (len(x), -1, self.config.head_dim)
        q = rotate(self.q_proj(x).view(shape), angles)
        k = rotate(self.k_proj(x).view(shape), angles)
        v = self.v_proj(x).view(shape)
        split = [y.split_with_sizes([*counts]) for y in (q, k, v)]
        mixed = [
            _attend(q, *cache.append(k, v)) for cache, q, k, v in zip(caches, *split, strict=True)
        ]
        found: Tensor = self.o_proj(torch.cat(mixed))
        return found


def _attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Let the last n rows of a sequence look at themselves and what stands before them, [n, -1]."""
    n, length = len(q), len(keys)
    allowed = None
    if n > 1:
        allowed = torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
    found = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=allowed,
        enable_gqa=True,
    )
    return found[0].transpose(0, 1).reshape(n, -1)


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
