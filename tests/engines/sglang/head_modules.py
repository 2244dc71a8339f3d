"""Runs SGLang's own head modules on a CPU, without a server: `head_modules.py IN OUT`.

IN holds cases by name, each with a kind, a config, weights and inputs; OUT gets what the modules
give. Attention goes through SGLang's backends, which want a whole server: it is replaced by torch's
over the rows given.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import SimpleNamespace

import torch
from torch.nn.functional import scaled_dot_product_attention

CONTEXT: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def start(path: str) -> None:
    """Make this process a server's only rank, as far as modules ask."""
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path=path, device="cpu", disable_cuda_graph=True)
    if find_spec("sglang.srt.runtime_context"):  # 0.5.23
        from sglang.srt.runtime_context import SpawnRanks, publish

        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    else:
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(args)
    rank = {"world_size": 1, "rank": 0, "local_rank": 0, "backend": "gloo"}
    init_distributed_environment(**rank, distributed_init_method=f"file://{sys.argv[2]}.rank")
    initialize_model_parallel()
    RadixAttention.forward = attend


def attend(self, q, k, v, forward_batch, save_kv_cache=True, **_):
    """Causal over the rows; with a context, over it and all rows."""
    sizes = (self.tp_q_head_num, self.tp_k_head_num, self.tp_v_head_num)
    q, k, v = (y.reshape(len(y), n, -1) for y, n in zip((q, k, v), sizes, strict=True))
    context = CONTEXT.get(self.layer_id)
    if context is not None:
        k, v = torch.cat([context[0], k]), torch.cat([context[1], v])
    rows = [y.transpose(0, 1)[None] for y in (q, k, v)]
    found = scaled_dot_product_attention(
        *rows, is_causal=context is None, enable_gqa=True, scale=self.scaling
    )
    return found[0].transpose(0, 1).reshape(len(q), -1)


def make(kind: str, config: dict):
    """Return SGLang's module of this kind."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    classes = {
        "eagle3": LlamaConfig,
        "eagle": LlamaConfig,
        "mtp": Qwen2Config,
        "dflash": Qwen3Config,
    }
    known = classes[kind](**config)
    for name, value in config.items():
        setattr(known, name, value)
    if kind == "eagle3":
        from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3 as Module
    elif kind == "eagle":
        from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle as Module
    elif kind == "mtp":
        from sglang.srt.models.mimo_mtp import MiMoMTP as Module
    else:
        from sglang.srt.models.dflash import DFlashDraftModel as Module
    return Module(known)


def run(given: dict) -> dict[str, torch.Tensor]:
    """Return what lm_head reads, and what the head reads next in place of the target's states."""
    model = make(given["kind"], given["config"]).float().eval()
    model.load_weights(given["weights"].items())
    mode = SimpleNamespace(
        is_extend=lambda: False, is_idle=lambda: False, is_decode=lambda: True,
        is_draft_extend=lambda **_: False, is_draft_extend_v2=lambda: False,
    )  # fmt: skip
    batch = SimpleNamespace(
        forward_mode=mode, mm_input_embeds=None, contains_mm_inputs=lambda: False,
        spec_info=SimpleNamespace(hidden_states=given["states"]),
    )  # fmt: skip
    CONTEXT.clear()
    if given["kind"] != "dflash":
        found = model.model(given["tokens"], given["positions"], batch)
        normed, fed = found if isinstance(found, tuple) else (found, [found])
        return {"normed": normed, "fed": fed[0]}
    c = model.project_target_hidden(given["states"])
    for i, layer in enumerate(model.layers):
        k, v = layer.self_attn.kv_proj_only(c)
        k = layer.self_attn.apply_k_norm(k.contiguous())
        k = layer.self_attn.apply_k_rope(torch.arange(len(c)), k)
        shape = (len(c), layer.self_attn.num_kv_heads, -1)
        CONTEXT[i] = k.view(shape), v.reshape(shape)
    out = model(given["tokens"], given["positions"], batch, given["embedded"])
    return {"normed": out.hidden_states}


@torch.no_grad()
def main() -> None:
    """Run the modules that IN describes."""
    given = torch.load(sys.argv[1])
    start(given["target"])
    torch.save({name: run(case) for name, case in given["cases"].items()}, sys.argv[2])


if __name__ == "__main__":
    main()
