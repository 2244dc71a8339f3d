"""What we rely on in SGLang 0.5.23: every name, with the parameters it must take."""

from __future__ import annotations

VERSION = "0.5.23"

_BACKEND = "layers.attention.base_attn_backend.AttentionBackend"

HOOKS: dict[str, str] = {
    "managers.multi_tokenizer_mixin.write_data_for_multi_tokenizer": (
        "port_args server_args scheduler_info"
    ),
    "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    ".save_remote_model": "self params",
    "server_args.ServerArgs.resolve_once": "self",
    "model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size": (
        "self kvc num_layers"
    ),
    "managers.tokenizer_manager.TokenizerManager.__init__": (
        "self server_args port_args start_pd_bootstrap_service"
    ),
    "entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request": (
        "self request raw_request"
    ),
    "entrypoints.openai.serving_completions.OpenAIServingCompletion"
    "._convert_to_internal_request": "self request raw_request",
    "managers.io_struct.GenerateReqInput.normalize_batch_and_arguments": "self",
    "managers.tokenizer_manager.TokenizerManager._validate_one_request": "self obj input_ids",
    "managers.tokenizer_manager.TokenizerManager._create_tokenized_object": (
        "self obj input_text input_ids input_embeds mm_inputs token_type_ids"
    ),
    "sampling.sampling_params.SamplingParams.verify": "self vocab_size",
    "sampling.sampling_batch_info.SamplingBatchInfo.copy_for_forward": "self",
    "speculative.spec_utils.spec_prepare_for_decode": "batch",
    "session.streaming_session.StreamingSession._trim_overshoot": "self req finished_len",
    "managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics": (
        "self meta_info recv_obj i"
    ),
    "managers.tokenizer_manager.TokenizerManager._handle_batch_output": "self recv_obj",
    "managers.tokenizer_manager.TokenizerManager.set_internal_state": "self obj",
    "managers.scheduler_components.output_streamer.SchedulerOutputStreamer"
    "._stream_output_generation": "self reqs return_logprob skip_req is_idle_batch",
    "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    "._resolve_spec_v2_tokens": "self result batch",
    "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    ".process_batch_result_prefill": "self batch result",
    "managers.schedule_batch.ScheduleBatch._new_tokens_required_next_decode_spec_v2": (
        "self requests page_size"
    ),
    "mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup": "self",
    "batch_invariant_ops.batch_invariant_ops.enable_batch_invariant_mode": "*",
    "constrained.base_grammar_backend.BaseGrammarBackend._init_value_dispatch": (
        "self key require_reasoning"
    ),
    "constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask": "self logits vocab_mask",
    "model_executor.runner.eager_runner.get_eager_max_batch_size": "max_batch_size",
    "layers.sampler.Sampler._preprocess_logits": "self logits sampling_info",
    "utils.common.support_triton": "backend",
    "arg_groups.speculative_hook._resolve_speculative_algorithm_alias": (
        "speculative_algorithm speculative_draft_model_path trust_remote_code kwargs"
    ),
    "arg_groups.boundary_reduction.resolve_boundary_reduction": "view",
    "arg_groups.lora_hook.check_lora_speculative_compatibility": "server_args",
    "layers.sampler.murmur_hash32": "seed positions col_indices",
}
"""What we hook, with its parameters."""

CALLS: dict[str, str] = {
    "constrained.base_grammar_backend.InvalidGrammarObject": "error_message",
    "sampling.custom_logit_processor.CustomLogitProcessor.from_str": "cls json_str",
    "session.streaming_session.StreamingSession._free_kv_aligned": "self kv target end",
    "mem_cache.base_prefix_cache.BasePrefixCache.evictable_size": "self",
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
    "layers.attention.attention_registry.register_attention_backend": "name",
    f"{_BACKEND}.forward": ("self q k v layer forward_batch save_kv_cache **"),
    f"{_BACKEND}.init_cuda_graph_state": ("self max_bs max_num_tokens"),
    f"{_BACKEND}.init_forward_metadata_out_graph": "self forward_batch in_capture",
    f"{_BACKEND}.shared_read_ends": "self fm",
    "distributed.parallel_state.GroupCoordinator.all_gather": "self input_ dim output_tensor_list",
    "distributed.parallel_state.GroupCoordinator.broadcast": "self input_ src",
    "layers.logits_processor.LogitsProcessor._compute_lm_head": (
        "self hidden_states lm_head embedding_bias out"
    ),
    "layers.quantization.unquant.UnquantizedLinearMethod.apply": "self layer x bias",
    "layers.sampler.Sampler.forward": (
        "self logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs "
        "positions logprob_logits"
    ),
    "layers.sampler.multinomial_with_seed": "logprobs seed positions",
    "managers.schedule_batch.FINISH_MATCHED_STR": "matched",
    "managers.schedule_batch.FINISHED_MATCHED_REGEX": "matched",
    "managers.schedule_batch.Req.update_finish_state": "self new_accepted_len",
    "managers.schedule_batch.Req.finished": "self",
    "managers.schedule_batch.Req.is_prefill_only": "self",
    "managers.schedule_batch.Req.update_spec_correct_drafts_histogram": "self num_correct_drafts",
    "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    "._accept_grammar_tokens": "self req tokens",
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
    "model_executor.forward_batch_info.ForwardMode.is_target_verify": "self",
    "model_executor.forward_batch_info.ForwardBatch.init_new": (
        "cls batch model_runner capture_hidden_mode return_hidden_states_before_norm "
        "extend_position_info spec_mrope_positions kv_loc_plan write_cols"
    ),
    "model_executor.model_runner.ModelRunner._preprocess_logits": (
        "self logits_output sampling_info observer"
    ),
    "sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.cumulate_output_tokens": (
        "self output_ids"
    ),
    "sampling.penaltylib.orchestrator._BatchedPenalizer.filter": "self keep_indices",
    "sampling.sampling_batch_info.SamplingBatchInfo.filter_batch": (
        "self keep_indices keep_indices_device"
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
    "speculative.spec_info.SpecInput.__init__": "self spec_input_type",
    "utils.common.freeze_gc": "context gc_threshold",
    "utils.common.is_hip": "",
    "utils.hf_transformers_utils.get_tokenizer": (
        "tokenizer_name * tokenizer_mode trust_remote_code tokenizer_revision tokenizer_backend **"
    ),
}
"""What we call, with its parameters."""

FIELDS: dict[str, str] = {
    "managers.tokenizer_manager.ReqState": "out_list obj",
    "arg_groups.fields.exec_.ExecFeatures": "enable_return_hidden_states",
    "sampling.sampling_params.SamplingParams": "custom_params stop_strs stream_interval",
    "sampling.sampling_batch_info.ProcessorEntry": "rows indices",
    "managers.utils.GenerationBatchResult": (
        "logits_output next_token_ids num_correct_drafts num_correct_drafts_per_req_cpu "
        "can_run_cuda_graph copy_done next_draft_input"
    ),
    "sampling.sampling_batch_info.SamplingBatchInfo": (
        "temperatures is_all_greedy need_top_p_sampling need_top_k_sampling need_min_p_sampling "
        "grammars penalizer_orchestrator has_custom_logit_processor custom_logit_processor "
        "custom_params "
        "sampling_seed acc_additive_penalties acc_scaling_penalties logit_bias"
    ),
    "managers.schedule_batch.ScheduleBatch": (
        "reqs req_to_token_pool token_to_kv_pool_allocator tree_cache forward_mode sampling_info "
        "req_pool_indices seq_lens seq_lens_cpu seq_lens_sum orig_seq_lens out_cache_loc "
        "has_grammar device is_prefill_only spec_algorithm spec_info return_logprob input_ids "
        "top_logprobs_nums token_ids_logprobs req_pool_indices_cpu is_extend_in_batch "
        "extend_num_tokens prefix_lens extend_lens extend_logprob_start_lens multimodal_inputs"
    ),
    "layers.logits_processor.LogitsProcessorOutput": (
        "next_token_logits hidden_states next_token_logprobs next_token_top_logprobs_val "
        "next_token_top_logprobs_idx next_token_token_ids_logprobs_val "
        "next_token_token_ids_logprobs_idx"
    ),
    "server_args.ServerArgs": (
        "speculative_algorithm speculative_draft_model_path speculative_num_steps "
        "speculative_num_draft_tokens speculative_eagle_topk disable_overlap_schedule "
        "enable_mixed_chunk enable_deterministic_inference attention_backend device "
        "enable_metrics served_model_name context_length tokenizer_path trust_remote_code "
        "pp_size page_size disaggregation_mode enable_dp_attention enable_hierarchical_cache "
        "enable_lora lora_paths enable_two_batch_overlap enable_pdmux enable_hisparse "
        "dllm_algorithm is_embedding speculative_adaptive speculative_token_map "
        "enable_multi_layer_eagle tp_size model_path enable_return_hidden_states"
    ),
}
"""What we read or replace in the host's dataclasses."""

ATTRIBUTES: dict[str, str] = {
    "managers.schedule_batch.Req": (
        "rid origin_input_ids output_ids sampling_params grammar finished_reason "
        "kv decode_batch_idx spec_verify_ct spec_num_correct_drafts return_logprob "
        "return_hidden_states hidden_states require_reasoning extra_key cache_salt stream "
        "finished_output finished_len output_ids_through_stop send_token_offset "
        "send_decode_id_offset reasoning_tokens is_retracted custom_logit_processor"
    ),
    "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor": (
        "model_worker"
    ),
    "managers.tokenizer_manager.TokenizerManager": "rid_to_state server_args",
    "distributed.parallel_state.GroupCoordinator": "rank_in_group world_size ranks cpu_group",
    "layers.linear.LinearBase": "quant_method",
    "layers.radix_attention.RadixAttention": (
        "tp_q_head_num qk_head_dim scaling layer_id logit_cap sliding_window_size attn_type "
        "is_cross_attention use_irope k_scale v_scale k_scale_float v_scale_float "
        "xai_temperature_len"
    ),
    "managers.tp_worker.TpModelWorker": "model_config world_group _model_runner",
    "model_executor.model_runner.ModelRunner": (
        "sampler req_to_token_pool is_hybrid_swa sliding_window_size page_size use_mla_backend "
        "device model_config attn_backend token_to_kv_pool"
    ),
    "sampling.penaltylib.orchestrator._BatchedPenalizer": "_orchestrator_ref _is_prepared",
    "sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator": "penalizers is_required",
}
"""What we read or write of the host's other objects: each must be assigned in its class."""
