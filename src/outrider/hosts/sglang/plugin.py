"""The plugin: what SGLang calls at start-up, and every hook we lay.

The hooks are laid whenever the package is installed, because SGLang loads plugins before it reads
its arguments. Each looks first whether OUTRIDER was chosen, and is SGLang's own code if not. Apart
from that stands the repair for ROCm, which $OUTRIDER_REPAIR asks for: it serves SGLang's own
algorithms. In an SGLang without a contract file no hook of these is laid: see `guest`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from outrider import __version__
from outrider.core import Unsupported
from outrider.hosts.sglang import contract_0_5_11 as contract
from outrider.hosts.sglang import cpu, guest, memory, rocm, settings
from outrider.hosts.sglang.profile import REPAIR_VARIABLE, load_profile, request_options

NAME = "OUTRIDER"
ATTENTION_BACKEND = "outrider"
WITHOUT_US = f"leave --speculative-algorithm {NAME} out"

logger = logging.getLogger(__name__)


class Algorithm:
    """Stands in for a member of SGLang's `SpeculativeAlgorithm`, a closed enum in 0.5.11.

    To the scheduler it is speculative, by the contract of spec v2 with overlap, of spec v1 without.
    To whoever captures CUDA graphs it is not: a verify pass of ours is a decode batch, so the
    graphs of plain decoding serve it.
    """

    name = NAME

    def is_none(self) -> bool:
        """Say no: there is a worker of ours."""
        return False

    def supports_spec_v2(self) -> bool:
        """Say yes: the scheduler may overlap. It asks only if it does."""
        return True

    def is_speculative(self) -> bool:
        """Say no: capture the graphs of plain decoding."""
        return False

    is_eagle = is_eagle3 = is_dflash = is_standalone = is_ngram = is_speculative

    def create_worker(self, server_args: Any) -> type:
        """Return our worker, having made sure that all hooks hold."""
        check_hooks()
        if server_args.disable_overlap_schedule:
            from outrider.hosts.sglang.worker import OutriderWorker

            return OutriderWorker
        from outrider.hosts.sglang.overlap import OverlapWorker

        return OverlapWorker


def register() -> None:
    """Lay the hooks. SGLang calls this in each of its processes."""
    import sglang

    if sglang.__version__ != contract.VERSION:
        guest.register(NAME, contract.VERSION)
        return
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, (hook, kind) in _HOOKS.items():
        HookRegistry.register(contract.hook_target(name), hook, HookType[kind])
    server_args.add_attention_backend_choices([ATTENTION_BACKEND])
    server_args.add_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    server_args.add_radix_supported_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    register_attention_backend(ATTENTION_BACKEND)(_attention_backend)


def check_hooks() -> None:
    """Stop the server unless every hook was laid: SGLang logs a failure and goes on."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [n for n in _HOOKS if contract.hook_target(n) not in HookRegistry._patched]
    if missing:
        _stop(f"these hooks were not laid: {', '.join(missing)}")


def check_contract(changed: list[str] | None = None, instead: str = WITHOUT_US) -> None:
    """Stop the server unless this SGLang is the one we know.

    changed: how it differs, by default from all of the contract but the repair for ROCm
    """
    import sglang

    changed = contract.differences() if changed is None else changed
    if sglang.__version__ != contract.VERSION or changed:
        _stop(
            f"this SGLang differs from the {contract.VERSION} that Outrider was written for",
            *changed,
            instead=instead,
        )


def _stop(what: str, *details: str, instead: str = WITHOUT_US) -> None:
    import sglang

    lines = "".join(f"\n  - {detail}" for detail in details)
    raise SystemExit(
        f"outrider: {what}{lines}\nfound SGLang {sglang.__version__}, Outrider {__version__}: "
        f"install SGLang {contract.VERSION}, or {instead}"
    )


def _chosen(server_args: Any) -> bool:
    return (server_args.speculative_algorithm or "").upper() == NAME


def _current_args() -> Any:
    """Return the server's arguments where SGLang has set them, else None."""
    from sglang.srt.server_args import get_global_server_args

    try:
        return get_global_server_args()
    except ValueError:
        return None


def _attention_backend(runner: Any) -> Any:
    from outrider.hosts.sglang.attention import attention_backend

    return attention_backend(runner)


# -- hooks. AROUND gets the original first, AFTER its result.


def _from_string(original: Callable[..., Any], cls: type, name: str | None) -> Any:
    return Algorithm() if name is not None and name.upper() == NAME else original(cls, name)


def _add_cli_args(result: None, parser: Any) -> None:
    (action,) = (a for a in parser._actions if a.dest == "speculative_algorithm")
    if NAME not in action.choices:
        action.choices = [*action.choices, NAME]


def _handle_speculative_decoding(result: None, self: Any) -> None:
    try:
        if settings.repairs(self):
            check_hooks()
            check_contract(contract.rocm_differences(), instead=f"unset {REPAIR_VARIABLE}")
        if _chosen(self):
            self.speculative_algorithm = NAME
            check_contract()
            settings.apply(self)
    except Unsupported as error:
        raise SystemExit(f"outrider: {error}") from error


def _handle_gpu_memory_settings(original: Callable[..., Any], self: Any, gpu_mem: Any) -> Any:
    is_ours = self.mem_fraction_static is None and _chosen(self) and self.device != "cpu"
    result = original(self, gpu_mem)
    if is_ours and gpu_mem is not None:
        memory.reserve(self, gpu_mem)
    return result


def _compute_cell_size(original: Callable[..., Any], self: Any, mr: Any, num_layers: int) -> Any:
    size, args = original(self, mr, num_layers), mr.server_args
    if mr.is_draft_worker or not _chosen(args) or args.speculative_draft_model_path is None:
        return size
    return size + memory.draft_cell_bytes(mr)


def _create_worker(result: type, self: Any, server_args: Any) -> None:
    if settings.repairs(server_args):
        # SGLang's schedulers are processes of their own: the launcher's check is not theirs
        check_contract(contract.rocm_differences(), instead=f"unset {REPAIR_VARIABLE}")
        rocm.repair()


def _verify_sampling_params(result: None, self: Any, vocab_size: int) -> None:
    args = _current_args()
    if args is None or not _chosen(args):
        return
    profile, has_draft_model = load_profile(), args.speculative_draft_model_path is not None
    request_options(self.custom_params, profile.names(has_draft_model), profile.report_acceptance)
    if self.min_p > 0 and args.enable_deterministic_inference:
        raise ValueError(
            "min_p with --enable-deterministic-inference: SGLang's seeded sampler does not have it"
        )


def _spec_decoding_metrics(
    result: None, self: Any, meta_info: dict[str, Any], recv_obj: Any, i: int
) -> None:
    """Correct what SGLang computes as if every step drafted K tokens, or take it away."""
    if not _chosen(self.server_args):
        return
    if not load_profile().report_acceptance:
        for name in [name for name in meta_info if name.startswith("spec_")]:
            del meta_info[name]
        return
    accepted = recv_obj.spec_accepted_drafts[i]
    if "spec_proposed_drafts" in meta_info:
        proposed = getattr(accepted, "proposed", 0)
        meta_info["spec_proposed_drafts"] = proposed
        meta_info["spec_accept_rate"] = int(accepted) / proposed if proposed else 0.0
    if steps := getattr(accepted, "steps", None):
        meta_info["outrider_steps"] = steps


def _flush_tokens(server_args: Any) -> int | None:
    return load_profile().flush_tokens if _chosen(server_args) else None


def _stream_output(
    original: Callable[..., Any],
    self: Any,
    reqs: list[Any],
    return_logprob: bool,
    skip_req: Any = None,
    is_idle_batch: bool = False,
) -> Any:
    size = _flush_tokens(self.server_args)
    if size is None:
        return original(self, reqs, return_logprob, skip_req, is_idle_batch)
    from outrider.hosts.sglang.flush import send_chunks

    told = [req for req in reqs if req is not skip_req]
    left = send_chunks(lambda ready: original(self, ready, return_logprob), told, size)
    # SGLang says how busy it is after every step, even if it has nothing else to say
    return original(self, left, return_logprob, None, is_idle_batch or bool(reqs))


def _handle_batch_output(original: Callable[..., Any], self: Any, recv_obj: Any) -> Any:
    if _flush_tokens(self.server_args) is None:
        return original(self, recv_obj)
    from outrider.hosts.sglang.flush import one_by_one

    return one_by_one(original, self, recv_obj)


def _model_worker_batch(result: Any, self: Any, seq_lens_cpu_cache: Any = None) -> None:
    if isinstance(self.spec_algorithm, Algorithm):
        result.outrider_batch = self  # under overlap, workers are given no more than the result


def _resolve_tokens(original: Callable[..., Any], self: Any, result: Any, batch: Any) -> Any:
    if isinstance(batch.spec_algorithm, Algorithm):
        return self.draft_worker.resolve(result, batch)
    return original(self, result, batch)


def _resolve_future(original: Callable[..., Any], self: Any, model_worker_batch: Any) -> Any:
    # ours keeps what the next step needs itself
    is_ours = isinstance(self.spec_algo, Algorithm)
    return None if is_ours else original(self, model_worker_batch)


def _store_to_map(original: Callable[..., Any], self: Any, indices: Any, result: Any) -> Any:
    return None if isinstance(self.spec_algo, Algorithm) else original(self, indices, result)


def _init_kv_copy(original: Callable[..., Any], self: Any) -> Any:
    args = _current_args()
    if self.device == "cpu" and args is not None and _chosen(args):
        self._kv_copy_config = None  # a Triton kernel; we never move cache entries
        return None
    return original(self)


def _batch_invariant_mode(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    current = _current_args()
    if (
        current is not None
        and current.device == "cpu"
        and (_chosen(current) or current.attention_backend == ATTENTION_BACKEND)
    ):
        return cpu.enable_row_invariance()
    return original(*args, **kwargs)


def _apply_vocab_mask(original: Callable[..., Any], self: Any, logits: Any, vocab_mask: Any) -> Any:
    args = _current_args()
    if logits.device.type == "cpu" and args is not None and _chosen(args):
        return cpu.apply_vocab_mask(logits, vocab_mask)
    return original(self, logits=logits, vocab_mask=vocab_mask)


def _support_triton(original: Callable[..., Any], backend: str) -> Any:
    args = _current_args()
    if backend == ATTENTION_BACKEND and args is not None and args.device == "cpu":
        return False
    return original(backend)


def _murmur_hash32(original: Callable[..., Any], seed: Any, positions: Any, columns: Any) -> Any:
    if seed.device.type == "cpu":
        return cpu.murmur_hash32(seed, positions, columns)
    return original(seed, positions, columns)


_HOOKS: dict[str, tuple[Callable[..., Any], str]] = {
    "speculative.spec_info.SpeculativeAlgorithm.from_string": (_from_string, "AROUND"),
    "speculative.spec_info.SpeculativeAlgorithm.create_worker": (_create_worker, "AFTER"),
    "server_args.ServerArgs.add_cli_args": (_add_cli_args, "AFTER"),
    "server_args.ServerArgs._handle_speculative_decoding": (_handle_speculative_decoding, "AFTER"),
    "server_args.ServerArgs._handle_gpu_memory_settings": (_handle_gpu_memory_settings, "AROUND"),
    "model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size": (
        _compute_cell_size,
        "AROUND",
    ),
    "sampling.sampling_params.SamplingParams.verify": (_verify_sampling_params, "AFTER"),
    "managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics": (
        _spec_decoding_metrics,
        "AFTER",
    ),
    "managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin"
    ".stream_output_generation": (_stream_output, "AROUND"),
    "managers.tokenizer_manager.TokenizerManager._handle_batch_output": (
        _handle_batch_output,
        "AROUND",
    ),
    "managers.schedule_batch.ScheduleBatch.get_model_worker_batch": (_model_worker_batch, "AFTER"),
    "managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin"
    "._resolve_spec_overlap_token_ids": (_resolve_tokens, "AROUND"),
    "managers.overlap_utils.FutureMap.resolve_future": (_resolve_future, "AROUND"),
    "managers.overlap_utils.FutureMap.store_to_map": (_store_to_map, "AROUND"),
    "mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup": (_init_kv_copy, "AROUND"),
    "batch_invariant_ops.batch_invariant_ops.enable_batch_invariant_mode": (
        _batch_invariant_mode,
        "AROUND",
    ),
    "constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask": (_apply_vocab_mask, "AROUND"),
    "utils.common.support_triton": (_support_triton, "AROUND"),
    "layers.utils.hash.murmur_hash32": (_murmur_hash32, "AROUND"),
}
