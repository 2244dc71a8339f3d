"""The formulas of heads, written out: loops over rows and heads, and no cache."""

from __future__ import annotations

import math

import torch


def turn(y, position, theta=10_000.0, dims=None):
    """Llama's rotary embedding of [heads, d]: dimension j with j + dims / 2, the others stay."""
    dims = dims or y.shape[-1]
    out = y.clone()
    for j in range(dims // 2):
        angle = position * theta ** (-2 * j / dims)
        a, b = y[..., j], y[..., j + dims // 2]
        out[..., j] = a * math.cos(angle) - b * math.sin(angle)
        out[..., j + dims // 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


def norm(x, module):
    """RMSNorm."""
    return (
        x
        / (x.square().mean(-1, keepdim=True) + module.eps).sqrt()
        * (module.weight + module.offset)
    )


def keys_values(attention, x, positions):
    """Return the keys and values of rows."""
    d, dims = attention.config.head_dim, attention.config.rotary_dim
    k, v = attention.k_proj(x).view(len(x), -1, d), attention.v_proj(x).view(len(x), -1, d)
    if attention.config.qk_norm:
        k = norm(k, attention.k_norm)
    return torch.stack([turn(k[i], p, dims=dims) for i, p in enumerate(positions)]), v


def attend(attention, x, positions, keys, values, sees):
    """Return attention's output. sees: [rows] which keys each row looks at"""
    config = attention.config
    d, heads = config.head_dim, config.num_heads
    q = attention.q_proj(x).view(len(x), heads, -1)
    gate = None
    if config.output_gate:
        q, gate = q[..., :d], q[..., d:]
    if config.qk_norm:
        q = norm(q, attention.q_norm)
    mixed = torch.empty(len(x), heads, d)
    for i, position in enumerate(positions):
        turned = turn(q[i], position, dims=config.rotary_dim)
        for h in range(heads):
            own = h // (heads // config.num_kv_heads)
            share = ((keys[sees[i], own] @ turned[h]) / math.sqrt(d)).softmax(0)
            mixed[i, h] = share @ values[sees[i], own]
    if gate is not None:
        mixed = mixed * gate.sigmoid()
    return attention.o_proj(mixed.reshape(len(x), -1))


def causal(attention, x, positions):
    """Return attention's output, each row seeing itself and those before it."""
    sees = [list(range(i + 1)) for i in range(len(x))]
    return attend(attention, x, positions, *keys_values(attention, x, positions), sees)


def mlp(module, x):
    """Return down(silu(gate) * up)."""
    gate = module.gate_proj(x)
    return module.down_proj(gate * gate.sigmoid() * module.up_proj(x))


def decoder_layer(layer, x, positions):
    """Return a layer of Llama's kind, causal."""
    h = x + causal(layer.self_attn, norm(x, layer.input_layernorm), positions)
    return h + mlp(layer.mlp, norm(h, layer.post_attention_layernorm))
