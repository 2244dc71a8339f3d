"""What we rely on in SGLang 0.5.23, beside what is in `contract_common`."""

from __future__ import annotations

from outrider.engines.sglang.versions import contract_common as common

VERSION = "0.5.23"

_PROCESSOR = "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"

HOOKS: dict[str, str] = common.HOOKS | {
    "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    ".save_remote_model": "self params",
    "server_args.ServerArgs.resolve_once": "self",
    "model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size": (
        "self kvc num_layers"
    ),
    "managers.tokenizer_manager.TokenizerManager.__init__": (
        "self server_args port_args start_pd_bootstrap_service"
    ),
    "sampling.sampling_batch_info.SamplingBatchInfo.copy_for_forward": "self",
    "speculative.spec_utils.spec_prepare_for_decode": "batch",
    "session.streaming_session.StreamingSession._trim_overshoot": "self req finished_len",
    "managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
    "._stream_output_generation": "self reqs return_logprob skip_req is_idle_batch",
    f"{_PROCESSOR}._resolve_spec_v2_tokens": "self result batch",
    f"{_PROCESSOR}.process_batch_result_prefill": "self batch result",
    "model_executor.runner.eager_runner.get_eager_max_batch_size": "max_batch_size",
    "arg_groups.speculative_hook._resolve_speculative_algorithm_alias": (
        "speculative_algorithm speculative_draft_model_path trust_remote_code kwargs"
    ),
    "arg_groups.boundary_reduction.resolve_boundary_reduction": "view",
    "arg_groups.lora_hook.check_lora_speculative_compatibility": "server_args",
    "layers.sampler.murmur_hash32": "seed positions col_indices",
}
"""What we hook, with its parameters."""

CALLS: dict[str, str] = common.CALLS | {
    "session.streaming_session.StreamingSession._free_kv_aligned": "self kv target end",
    "mem_cache.allocator.base.BaseTokenToKVPoolAllocator.available_size": "self",
    "mem_cache.allocator.base.BaseTokenToKVPoolAllocator.free": "self free_index",
    "configs.model_config.ModelConfig.from_server_args": (
        "server_args model_path model_revision is_draft_model context_length **"
    ),
    "managers.io_struct.msgpack_encode": "obj",
    "managers.io_struct.msgpack_decode": "data",
    "runtime_context.get_server_args": "",
    "runtime_context.get_parallel": "",
    "runtime_context.get_context": "",
    "runtime_context.RuntimeContext.override": "self source **",
    "arg_groups.overrides.resolving_view": "server_args",
    "server_args.add_attention_backend_choices": "iterable",
    "server_args.add_deterministic_attention_backend_choices": "iterable",
    "server_args.add_radix_supported_deterministic_attention_backend_choices": "iterable",
    f"{common.BACKEND}.init_forward_metadata_out_graph": "self forward_batch in_capture",
    f"{common.BACKEND}.shared_read_ends": "self fm",
    "layers.logits_processor.LogitsProcessor._compute_lm_head": (
        "self hidden_states lm_head embedding_bias out"
    ),
    "layers.sampler.Sampler.forward": (
        "self logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs "
        "positions logprob_logits"
    ),
    "managers.schedule_batch.Req.update_finish_state": "self new_accepted_len",
    "managers.schedule_batch.Req.update_spec_correct_drafts_histogram": "self num_correct_drafts",
    f"{_PROCESSOR}._accept_grammar_tokens": "self req tokens",
    "managers.overlap_utils.FutureMap.__init__": (
        "self device spec_algo req_to_token_pool needs_cpu_seq_lens needs_confidence_relay"
    ),
    "managers.overlap_utils.FutureMap.resolve_seq_lens_cpu": "self batch stream_ordered",
    "managers.overlap_utils.FutureMap._resolve_spec_extras": "self batch",
    "managers.overlap_utils.FutureMap.publish": "self future_indices new_seq_lens confidence",
    "managers.overlap_utils.FutureMap.stash": "self future_indices payload",
    "managers.tp_worker.TpModelWorker.__init__": (
        "self server_args gpu_id nccl_port is_draft_worker req_to_token_pool "
        "token_to_kv_pool_allocator memory_pool_config is_multi_layer_eagle context_length "
        "draft_attention_backend random_seed load_group"
    ),
    "managers.tp_worker.TpModelWorker.forward_batch_generation": (
        "self batch forward_batch pp_proxy_tensors is_verify skip_attn_backend_init "
        "capture_hidden_mode return_kv_loc_plan"
    ),
    "mem_cache.allocation_sizing.get_alloc_len_per_decode": "",
    "mem_cache.allocation.alloc_token_slots": "tree_cache num_tokens",
    "mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer": (
        "self layer loc_info cache_k cache_v k_scale v_scale layer_id_override dcp_kv_mask"
    ),
    "model_executor.forward_batch_info.ForwardBatch.init_new": (
        "cls batch model_runner capture_hidden_mode return_hidden_states_before_norm "
        "extend_position_info spec_mrope_positions kv_loc_plan write_cols"
    ),
    "model_executor.model_runner.ModelRunner._preprocess_logits": (
        "self logits_output sampling_info observer"
    ),
    "speculative.base_spec_worker.BaseSpecWorker.init_cuda_graphs": "self",
    "speculative.base_spec_worker.BaseSpecWorker.weight_update_runners": "self",
    "speculative.spec_info.SpeculativeAlgorithm.register": (
        "cls name supports_overlap validate_server_args spec_class"
    ),
    "speculative.dflash_info.DFlashVerifyInput.__init__": (
        "self draft_token positions draft_token_num topk custom_mask capture_hidden_mode "
        "num_tokens_per_req ragged_verify_layout live_seq_lens_cpu "
        "candidate_max_seq_len_upper_bound kv_loc_plan kv_loc_cols"
    ),
    "utils.common.freeze_gc": "context gc_threshold",
}
"""What we call, with its parameters."""

NAMES: tuple[str, ...] = (
    *common.NAMES,
    "layers.attention.base_attn_backend.SharedReadEnds",
    "speculative.spec_registry.CustomSpecAlgo.is_speculative",
    "speculative.spec_info.SpeculativeAlgorithm.carries_draft_hidden_states",
    "speculative.spec_info.SpeculativeAlgorithm.create_future_map",
    "speculative.spec_info.SpeculativeAlgorithm.need_topk",
)
"""What we import, override or call without parameters."""

FIELDS: dict[str, str] = common.extended(
    common.FIELDS,
    {
        "arg_groups.fields.exec_.ExecFeatures": "enable_return_hidden_states",
        "sampling.sampling_params.SamplingParams": "custom_params stop_strs stream_interval",
        "sampling.sampling_batch_info.ProcessorEntry": "rows indices",
        "managers.utils.GenerationBatchResult": "num_correct_drafts num_correct_drafts_per_req_cpu",
        "sampling.sampling_batch_info.SamplingBatchInfo": "custom_logit_processor",
        "managers.schedule_batch.ScheduleBatch": (
            "input_ids top_logprobs_nums token_ids_logprobs req_pool_indices_cpu "
            "is_extend_in_batch extend_num_tokens prefix_lens extend_lens "
            "extend_logprob_start_lens multimodal_inputs"
        ),
    },
)
"""What we read or replace in the host's dataclasses."""

ATTRIBUTES: dict[str, str] = common.extended(
    common.ATTRIBUTES,
    {
        "managers.schedule_batch.Req": "kv spec_num_correct_drafts cache_salt",
        _PROCESSOR: "model_worker",
        "model_executor.model_runner.ModelRunner": "sliding_window_size",
    },
)
"""What we read or write of the host's other objects: each must be assigned in its class."""
