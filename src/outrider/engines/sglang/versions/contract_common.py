"""What we rely on in all SGLang versions that we know. The contract of each adds its own names."""

from __future__ import annotations

BACKEND = "layers.attention.base_attn_backend.AttentionBackend"

HOOKS: dict[str, str] = {
    "managers.multi_tokenizer_mixin.write_data_for_multi_tokenizer": (
        "port_args server_args scheduler_info"
    ),
    "entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request": (
        "self request raw_request"
    ),
    "entrypoints.openai.serving_completions.OpenAIServingCompletion._convert_to_internal_request": (
        "self request raw_request"
    ),
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
}
"""What we hook, with its parameters."""

CALLS: dict[str, str] = {
    "constrained.base_grammar_backend.InvalidGrammarObject": "error_message",
    "sampling.custom_logit_processor.CustomLogitProcessor.from_str": "cls json_str",
    "mem_cache.base_prefix_cache.BasePrefixCache.evictable_size": "self",
    "layers.attention.attention_registry.register_attention_backend": "name",
    f"{BACKEND}.forward": "self q k v layer forward_batch save_kv_cache **",
    f"{BACKEND}.init_cuda_graph_state": "self max_bs max_num_tokens",
    "distributed.parallel_state.GroupCoordinator.all_gather": (
        "self input_ dim output_tensor_list"
    ),
    "distributed.parallel_state.GroupCoordinator.broadcast": "self input_ src",
    "layers.quantization.unquant.UnquantizedLinearMethod.apply": "self layer x bias",
    "layers.sampler.multinomial_with_seed": "logprobs seed positions",
    "managers.schedule_batch.FINISH_MATCHED_STR": "matched",
    "managers.schedule_batch.FINISHED_MATCHED_REGEX": "matched",
    "managers.schedule_batch.Req.finished": "self",
    "managers.schedule_batch.Req.is_prefill_only": "self",
    "model_executor.forward_batch_info.ForwardMode.is_target_verify": "self",
    "sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.cumulate_output_tokens": (
        "self output_ids"
    ),
    "sampling.penaltylib.orchestrator._BatchedPenalizer.filter": "self keep_indices",
    "sampling.sampling_batch_info.SamplingBatchInfo.filter_batch": (
        "self keep_indices keep_indices_device"
    ),
    "speculative.spec_info.SpecInput.__init__": "self spec_input_type",
    "utils.common.is_hip": "",
    "utils.hf_transformers_utils.get_tokenizer": (
        "tokenizer_name * tokenizer_mode trust_remote_code tokenizer_revision tokenizer_backend **"
    ),
}
"""What we call, with its parameters."""

NAMES: tuple[str, ...] = (
    "constrained.base_grammar_backend.BaseGrammarObject.rollback",
    "layers.radix_attention.AttentionType",
    "managers.schedule_batch.FINISH_LENGTH",
    "model_executor.forward_batch_info.CaptureHiddenMode",
    "model_executor.forward_batch_info.ForwardMode.is_decode",
    "model_executor.forward_batch_info.ForwardMode.is_extend",
    "sampling.sampling_params.TOP_K_ALL",
    "speculative.spec_info.SpecInputType",
)
"""What we import, override or call without parameters: it must be there."""

FIELDS: dict[str, str] = {
    "managers.tokenizer_manager.ReqState": "out_list obj",
    "managers.utils.GenerationBatchResult": (
        "logits_output next_token_ids can_run_cuda_graph copy_done next_draft_input"
    ),
    "sampling.sampling_batch_info.SamplingBatchInfo": (
        "temperatures is_all_greedy need_top_p_sampling need_top_k_sampling need_min_p_sampling "
        "grammars penalizer_orchestrator has_custom_logit_processor custom_params sampling_seed "
        "acc_additive_penalties acc_scaling_penalties logit_bias"
    ),
    "managers.schedule_batch.ScheduleBatch": (
        "reqs req_to_token_pool token_to_kv_pool_allocator tree_cache forward_mode "
        "sampling_info req_pool_indices seq_lens seq_lens_cpu seq_lens_sum orig_seq_lens "
        "out_cache_loc has_grammar device is_prefill_only spec_algorithm spec_info "
        "return_logprob"
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
        "decode_batch_idx spec_verify_ct return_logprob return_hidden_states hidden_states "
        "require_reasoning extra_key stream finished_output finished_len "
        "output_ids_through_stop send_token_offset send_decode_id_offset reasoning_tokens "
        "is_retracted custom_logit_processor"
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
        "sampler req_to_token_pool is_hybrid_swa page_size use_mla_backend device model_config "
        "attn_backend token_to_kv_pool"
    ),
    "sampling.penaltylib.orchestrator._BatchedPenalizer": "_orchestrator_ref _is_prepared",
    "sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator": "penalizers is_required",
}
"""What we read or write of the host's other objects: each must be assigned in its class."""


def extended(fields: dict[str, str], more: dict[str, str]) -> dict[str, str]:
    """Return the fields by class: those of `fields`, and behind them those of `more`."""
    return fields | {name: f"{fields.get(name, '')} {more[name]}".strip() for name in more}
