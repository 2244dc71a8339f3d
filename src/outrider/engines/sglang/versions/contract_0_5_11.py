"""What we rely on in SGLang 0.5.11: every name, with the parameters it must take."""

from __future__ import annotations

VERSION = "0.5.11"

_BACKEND = "layers.attention.base_attn_backend.AttentionBackend"

HOOKS: dict[str, str] = {
    "managers.multi_tokenizer_mixin.write_data_for_multi_tokenizer": (
        "port_args server_args scheduler_info"
    ),
    "managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin"
    ".save_remote_model": "self params",
    "speculative.spec_info.SpeculativeAlgorithm.from_string": "cls name",
    "speculative.spec_info.SpeculativeAlgorithm.create_worker": "self server_args",
    "server_args.ServerArgs.add_cli_args": "parser",
    "server_args.ServerArgs.__post_init__": "self",
    "server_args.ServerArgs._handle_speculative_decoding": "self",
    "server_args.ServerArgs._handle_gpu_memory_settings": "self gpu_mem",
    "model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size": (
        "self mr num_layers"
    ),
    "entrypoints.openai.serving_base.OpenAIServingBase._compute_extra_key": "self request",
    "managers.tokenizer_manager.TokenizerManager.__init__": "self server_args port_args",
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
    "managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics": (
        "self meta_info recv_obj i"
    ),
    "managers.tokenizer_manager.TokenizerManager._handle_batch_output": "self recv_obj",
    "managers.tokenizer_manager.TokenizerManager.set_internal_state": "self obj",
    "managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin"
    ".stream_output_generation": "self reqs return_logprob skip_req is_idle_batch",
    "managers.schedule_batch.ScheduleBatch.get_model_worker_batch": "self seq_lens_cpu_cache",
    "managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin"
    "._resolve_spec_overlap_token_ids": "self result batch",
    "managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin"
    ".process_batch_result_prefill": "self batch result",
    "managers.overlap_utils.FutureMap.resolve_future": "self model_worker_batch",
    "managers.overlap_utils.FutureMap.store_to_map": "self future_indices batch_result",
    "managers.schedule_batch.ScheduleBatch._new_tokens_required_next_decode_spec_v2": (
        "self requests page_size"
    ),
    "mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup": "self",
    "batch_invariant_ops.batch_invariant_ops.enable_batch_invariant_mode": "*",
    "constrained.base_grammar_backend.BaseGrammarBackend._init_value_dispatch": (
        "self key require_reasoning"
    ),
    "constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask": "self logits vocab_mask",
    "layers.sampler.Sampler._preprocess_logits": "self logits sampling_info",
    "utils.common.support_triton": "backend",
    "model_executor.cuda_graph_runner.CudaGraphRunner.can_run": "self forward_batch",
    "model_executor.model_runner.ModelRunner.init_aux_hidden_state_capture": "self",
    "layers.utils.hash.murmur_hash32": "seed positions col_indices",
}
"""What we hook, with its parameters."""

CALLS: dict[str, str] = {
    "constrained.base_grammar_backend.InvalidGrammarObject": "error_message",
    "sampling.custom_logit_processor.CustomLogitProcessor.from_str": "cls json_str",
    "mem_cache.base_prefix_cache.BasePrefixCache.evictable_size": "self",
    "mem_cache.allocator.BaseTokenToKVPoolAllocator.available_size": "self",
    "mem_cache.allocator.BaseTokenToKVPoolAllocator.free": "self free_index",
    "configs.model_config.ModelConfig.from_server_args": (
        "server_args model_path model_revision is_draft_model **"
    ),
    "server_args.get_global_server_args": "",
    "server_args.add_attention_backend_choices": "choices",
    "server_args.add_deterministic_attention_backend_choices": "choices",
    "server_args.add_radix_supported_deterministic_attention_backend_choices": "choices",
    "layers.attention.attention_registry.register_attention_backend": "name",
    f"{_BACKEND}.forward": ("self q k v layer forward_batch save_kv_cache **"),
    f"{_BACKEND}.init_cuda_graph_state": ("self max_bs max_num_tokens"),
    f"{_BACKEND}.init_forward_metadata_capture_cuda_graph": (
        "self bs num_tokens req_pool_indices seq_lens encoder_lens forward_mode spec_info"
    ),
    f"{_BACKEND}.init_forward_metadata_replay_cuda_graph": (
        "self bs req_pool_indices seq_lens seq_lens_sum encoder_lens forward_mode spec_info "
        "seq_lens_cpu"
    ),
    "distributed.parallel_state.GroupCoordinator.all_gather": "self input_ dim output_tensor_list",
    "distributed.parallel_state.GroupCoordinator.broadcast": "self input_ src",
    "layers.dp_attention.get_attention_tp_size": "",
    "layers.logits_processor.LogitsProcessor._compute_lm_head": (
        "self hidden_states lm_head embedding_bias"
    ),
    "layers.quantization.unquant.UnquantizedLinearMethod.apply": "self layer x bias",
    "layers.sampler.Sampler.forward": (
        "self logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs "
        "positions"
    ),
    "layers.sampler.multinomial_with_seed": "logprobs seed positions",
    "managers.schedule_batch.FINISH_MATCHED_STR": "matched",
    "managers.schedule_batch.FINISHED_MATCHED_REGEX": "matched",
    "managers.schedule_batch.Req.check_finished": "self new_accepted_len",
    "managers.schedule_batch.Req.finished": "self",
    "managers.schedule_batch.Req.is_prefill_only": "self",
    "managers.schedule_batch.Req.update_spec_acceptance_histogram": "self accepted_draft_tokens",
    "managers.tp_worker.TpModelWorker.__init__": (
        "self server_args gpu_id tp_rank moe_ep_rank pp_rank attn_cp_rank moe_dp_rank dp_rank "
        "nccl_port is_draft_worker req_to_token_pool token_to_kv_pool_allocator "
        "memory_pool_config is_multi_layer_eagle"
    ),
    "managers.tp_worker.TpModelWorker.forward_batch_generation": (
        "self model_worker_batch forward_batch pp_proxy_tensors is_verify skip_attn_backend_init"
    ),
    "managers.tp_worker.TpModelWorker.get_memory_pool": "self",
    "managers.tp_worker.TpModelWorker.update_weights_from_tensor": "self recv_req",
    "managers.utils.get_alloc_len_per_decode": "server_args",
    "mem_cache.common.alloc_token_slots": "tree_cache num_tokens backup_state",
    "mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer": (
        "self layer loc cache_k cache_v k_scale v_scale layer_id_override"
    ),
    "model_executor.forward_batch_info.ForwardMode.is_target_verify": "self",
    "model_executor.forward_batch_info.ForwardBatch.init_new": "cls batch model_runner",
    "model_executor.model_runner.ModelRunner._preprocess_logits": (
        "self logits_output sampling_info"
    ),
    "sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.cumulate_output_tokens": (
        "self output_ids"
    ),
    "sampling.penaltylib.orchestrator._BatchedPenalizer.filter": "self keep_indices",
    "sampling.sampling_batch_info.SamplingBatchInfo.filter_batch": (
        "self keep_indices keep_indices_device"
    ),
    "sampling.sampling_batch_info.SamplingBatchInfo.copy_for_forward": "self",
    "speculative.dflash_info.DFlashVerifyInput.__init__": (
        "self draft_token positions draft_token_num topk custom_mask capture_hidden_mode "
        "num_tokens_per_batch"
    ),
    "speculative.spec_info.SpecInput.__init__": "self spec_input_type",
    "utils.common.freeze_gc": "context",
    "utils.common.is_hip": "",
    "utils.hf_transformers_utils.get_tokenizer": (
        "tokenizer_name * tokenizer_mode trust_remote_code tokenizer_revision tokenizer_backend **"
    ),
}
"""What we call, with its parameters."""

FIELDS: dict[str, str] = {
    "managers.schedule_batch.ModelWorkerBatch": (
        "forward_mode input_ids req_pool_indices seq_lens out_cache_loc seq_lens_cpu "
        "seq_lens_sum top_logprobs_nums token_ids_logprobs sampling_info orig_seq_lens "
        "spec_info reqs return_logprob capture_hidden_mode is_extend_in_batch "
        "extend_num_tokens extend_seq_lens extend_prefix_lens extend_logprob_start_lens "
        "multimodal_inputs is_prefill_only"
    ),
    "managers.tokenizer_manager.ReqState": "out_list obj",
    "managers.utils.GenerationBatchResult": (
        "logits_output next_token_ids num_accepted_drafts num_accepted_drafts_per_req_cpu "
        "can_run_cuda_graph copy_done next_draft_input"
    ),
    "sampling.sampling_batch_info.SamplingBatchInfo": (
        "temperatures is_all_greedy need_top_p_sampling need_top_k_sampling need_min_p_sampling "
        "grammars vocab_mask penalizer_orchestrator has_custom_logit_processor custom_params "
        "sampling_seed acc_additive_penalties acc_scaling_penalties logit_bias"
    ),
    "managers.schedule_batch.ScheduleBatch": (
        "reqs req_to_token_pool token_to_kv_pool_allocator tree_cache forward_mode sampling_info "
        "req_pool_indices seq_lens seq_lens_cpu seq_lens_sum orig_seq_lens out_cache_loc "
        "has_grammar device is_prefill_only spec_algorithm spec_info return_logprob"
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
        "kv_committed_len kv_allocated_len decode_batch_idx spec_verify_ct spec_accepted_drafts "
        "return_logprob return_hidden_states "
        "hidden_states require_reasoning req_pool_idx extra_key stream finished_output "
        "finished_len output_ids_through_stop send_token_offset send_decode_id_offset "
        "reasoning_tokens is_retracted custom_logit_processor input_token_logprobs "
        "temp_input_token_ids_logprobs_val temp_input_token_ids_logprobs_idx"
    ),
    "managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin": "server_args",
    "managers.overlap_utils.FutureMap": "spec_algo",
    "managers.scheduler.Scheduler": "draft_worker",
    "managers.tokenizer_manager.TokenizerManager": "rid_to_state server_args",
    "sampling.sampling_params.SamplingParams": "custom_params stop_strs stream_interval",
    "distributed.parallel_state.GroupCoordinator": "rank_in_group world_size ranks cpu_group",
    "layers.linear.LinearBase": "quant_method",
    "layers.radix_attention.RadixAttention": (
        "tp_q_head_num qk_head_dim scaling layer_id logit_cap sliding_window_size attn_type "
        "is_cross_attention use_irope k_scale v_scale k_scale_float v_scale_float "
        "xai_temperature_len"
    ),
    "managers.tp_worker.TpModelWorker": "model_config world_group _model_runner",
    "model_executor.model_runner.ModelRunner": (
        "sampler req_to_token_pool is_hybrid_swa use_ngram_embedding page_size use_mla_backend "
        "device model_config attn_backend graph_runner token_to_kv_pool"
    ),
    "sampling.penaltylib.orchestrator._BatchedPenalizer": "_orchestrator_ref _is_prepared",
    "sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator": "penalizers is_required",
}
"""What we read or write of the host's other objects: each must be assigned in its class."""

ROCM_SWITCHES: dict[str, dict[str, tuple[bool, str]]] = {
    "speculative.eagle_info": {"TREE_SPEC_KERNEL_AVAILABLE": (True, "verify")},
    "speculative.ngram_info": {"TREE_SPEC_KERNEL_AVAILABLE": (True, "verify")},
    "speculative.eagle_info_v2": {
        "_is_hip": (False, "sample assign_extend_cache_locs_func"),
        # the second function asks `_is_cuda or _is_hip`: its answer must not change
        "_is_cuda": (True, "assign_extend_cache_locs_func"),
    },
    "speculative.dflash_utils": {
        "_DFLASH_SAMPLING_VERIFY_AVAILABLE": (
            True,
            "is_dflash_sampling_verify_available compute_dflash_sampling_accept_len_and_bonus",
        )
    },
}
"""What the repair for ROCm sets in the host's modules, and which functions there look at it."""

ROCM_CALLS: dict[str, str] = {
    "top_k_renorm_prob": "2",
    "top_p_renorm_prob": "2",
    "tree_speculative_sampling_target_only": (
        "0 predicts accept_index accept_token_num candidates retrive_index retrive_next_token "
        "retrive_next_sibling uniform_samples uniform_samples_for_final_sampling target_probs "
        "draft_probs threshold_single threshold_acc deterministic"
    ),
}
"""What those modules call and ROCm lacks: how many positional arguments, and which keywords."""
