"""SGLang's flags with which Outrider does not start: those whose effect it cannot give.

A test asks the parser of each SGLang version for its flags, and fails for one that is neither here
nor in the test's own table of flags that are served or do not matter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider.core import Unsupported


@dataclass(frozen=True)
class Refusal:
    """What the server does not start with.

    what: its name in the message
    fix: what to do instead, and why
    fields: the names of its flags in SGLang's arguments
    asks: whether arguments ask for it
    """

    what: str
    fix: str
    fields: tuple[str, ...]
    asks: Callable[[Any], bool]

    def check(self, args: Any) -> None:
        """Raise Unsupported if these arguments ask for it."""
        if self.asks(args):
            raise Unsupported(self.what, fix=self.fix)


def _flags(fix: str, **neutral: Any) -> tuple[Refusal, ...]:
    """Return one refusal for each flag. neutral: the value with which a flag asks for nothing"""

    def asks(name: str, value: Any) -> Callable[[Any], bool]:
        return lambda args: getattr(args, name, None) not in (None, value)

    return tuple(
        Refusal(f"--{name.replace('_', '-')}", fix, (name,), asks(name, value))
        for name, value in neutral.items()
    )


def _unlike_target(name: str) -> Callable[[Any], bool]:
    """Return a test for a flag of the draft model that has the same name for the target.

    SGLang writes the target's into it where none is given.
    """

    def asks(args: Any) -> bool:
        value = getattr(args, f"speculative_{name}", None)
        return value not in (None, getattr(args, name.removeprefix("draft_model_"), None))

    return asks


REFUSED: tuple[Refusal, ...] = (
    *_flags("use --tp-size", pp_size=1),
    *_flags("use --dp-size without it", enable_dp_attention=False, attn_dp_size=1),
    *_flags(
        "use --tp-size: a draft model and heads read whole prompts on each rank",
        attn_cp_size=1,
        dcp_size=1,
        enable_prefill_cp=False,
        enable_prefill_context_parallel=False,
        enable_nsa_prefill_context_parallel=False,
    ),
    *_flags("leave it out: Outrider's ranks are those of the start", elastic_ep_backend="none"),
    *_flags(
        "leave it out",
        disaggregation_mode="null",
        enable_two_batch_overlap=False,
        enable_pdmux=False,
        enable_hisparse=False,
        enable_unified_memory=False,
        enable_watermark=False,
    ),
    *_flags(
        "leave it out: what a draft model and heads keep for a token does not go to that cache",
        enable_hierarchical_cache=False,
        enable_lmcache=False,
        enable_flexkv=False,
        enable_unified_cache_external_linker=False,
        radix_cache_backend=None,
    ),
    *_flags("serve an autoregressive model", dllm_algorithm=None),
    *_flags("serve without speculation", is_embedding=False),
    *_flags(
        "leave it out: nothing records this of the rows of drafts",
        enable_return_routed_experts=False,
        enable_return_indexer_topk=False,
        enable_return_aux_hidden_states=False,
    ),
    *_flags(
        "leave it out: it knows the passes of SGLang's own algorithms",
        kv_canary="none",
    ),
    *_flags(
        "leave it out: its processes do not load SGLang's plugins",
        use_ray=False,
        grpc_mode=False,
        smg_grpc_mode=False,
    ),
    *_flags(
        "leave it out: it changes which drafts are accepted, and Outrider accepts those alone that "
        "plain decoding would emit",
        speculative_accept_threshold_single=1.0,
        speculative_accept_threshold_acc=1.0,
        speculative_use_rejection_sampling=False,
        speculative_use_block_verification=False,
    ),
    Refusal(
        "SGLANG_RUST_SERVER",
        "unset it: its process does not load SGLang's plugins",
        (),
        lambda args: os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes", "y"),
    ),
    Refusal(
        "--speculative-eagle-topk above 1",
        "leave it out: width in the profile makes trees",
        ("speculative_eagle_topk",),
        lambda args: args.speculative_eagle_topk not in (None, 1),
    ),
    *_flags(
        "leave it out: min_n and max_n of the profile's drafter ngram are Outrider's",
        speculative_ngram_min_bfs_breadth=1,
        speculative_ngram_max_bfs_breadth=10,
        speculative_ngram_match_type="BFS",
        speculative_ngram_max_trie_depth=18,
        speculative_ngram_capacity=10_000_000,
        speculative_ngram_external_corpus_path=None,
        speculative_ngram_external_sam_budget=0,
        speculative_ngram_external_corpus_max_tokens=10_000_000,
    ),
    *_flags(
        "leave it out: it belongs to one of SGLang's own algorithms, and would do nothing",
        enable_multi_layer_eagle=False,
        speculative_adaptive=False,
        speculative_adaptive_config=None,
        speculative_token_map=None,
        speculative_dflash_block_size=None,
        speculative_dflash_draft_window_size=None,
        speculative_draft_window_size=None,
        speculative_draft_sink_size=None,
        speculative_domino_candidate_pool_size=2048,
        speculative_dspark_align_verify_tokens_to_graph_tier=False,
        speculative_dspark_block_size=None,
        speculative_dspark_confidence_sts_path=None,
        speculative_dspark_sps_table_path=None,
        speculative_dsa_topk_backend="sgl-kernel",
        speculative_enable_w4a4_mxfp4_megamoe=None,
        speculative_skip_dp_mlp_sync=False,
        decoupled_spec_role="null",
        decoupled_spec_rank=None,
        decoupled_spec_bind_endpoint=None,
        decoupled_spec_connect_endpoints=None,
        spec_trace_dir=None,
        uno_lora_path=None,
    ),
    *(
        Refusal(
            f"--speculative-{name.replace('_', '-')}",
            "leave it out: a draft model has the target's",
            (f"speculative_{name}",),
            _unlike_target(name),
        )
        for name in ("moe_runner_backend", "moe_a2a_backend")
    ),
    Refusal(
        "LoRA adapters with a draft model",
        "leave --speculative-draft-model-path out: SGLang would give adapters to it, too",
        ("enable_lora", "lora_paths"),
        lambda args: bool(
            (args.enable_lora or args.lora_paths) and args.speculative_draft_model_path
        ),
    ),
)
"""What is refused at start-up."""

_DRAFT_MODEL = "leave it out, or name a draft model with --speculative-draft-model-path"

WITH_DRAFT_MODEL: tuple[Refusal, ...] = (
    *_flags(
        _DRAFT_MODEL,
        speculative_draft_model_revision="main",
        speculative_draft_load_format=None,
        speculative_draft_attention_backend=None,
        speculative_draft_kv_cache_dtype=None,
        enable_draft_weights_cpu_backup=False,
        decrypted_draft_config_file=None,
    ),
    Refusal(
        "--speculative-draft-model-quantization",
        _DRAFT_MODEL,
        ("speculative_draft_model_quantization",),
        _unlike_target("draft_model_quantization"),
    ),
)
"""What is refused without a draft model, and with a head in its place, which Outrider loads."""
