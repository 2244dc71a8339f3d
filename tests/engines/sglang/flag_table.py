"""SGLang's flags that Outrider does not refuse, and why: what it refuses is in its own table."""

from __future__ import annotations

PASSED: dict[str, str] = {
    "what is served: names, model, tokenizer, templates, weights": """
        model_path tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num
        detokenizer_worker_num skip_tokenizer_init load_format model_loader_extra_config
        trust_remote_code context_length revision model_impl model_config_parser download_dir
        model_checksum served_model_name weight_version json_model_override_args
        preferred_sampling_params sampling_defaults chat_template hf_chat_template_name
        completion_template default_chat_template_kwargs trust_request_chat_template
        reasoning_parser strip_thinking_cache enable_strict_thinking tool_call_parser tool_server
        config decrypted_config_file custom_weight_loader weight_loader_disable_mmap
        weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
        weight_loader_drop_cache_after_load startup_weight_load_mode weight_cache_mode
        weight_cache_socket weight_cache_timeout delete_ckpt_after_loading
        checkpoint_engine_wait_weights_before_ready remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend
        remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port
        modelexpress_config gated_launch_port
    """,
    "how it is reached; requests pass the tokenizer's checks": """
        host port fastapi_root_path skip_server_warmup warmups ssl_keyfile ssl_certfile ssl_ca_certs
        ssl_keyfile_password enable_ssl_refresh enable_http2 http2_max_concurrent_streams
        http2_initial_connection_window_size enable_http_worker_reuseport grpc_port
        grpc_response_timeout_secs sidecar sidecar_args grpc_http_sidecar_port smg_http_sidecar_port
        api_key admin_api_key file_storage_path enable_response_store stream_interval
        batch_notify_size incremental_streaming_output stream_response_default_include_usage
        return_input_ids return_output_ids enable_cache_report enable_tokenizer_batch_encode
        disable_tokenizer_batch_decode enable_dynamic_batch_tokenizer
        dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout allow_auto_truncate
    """,
    "what is logged, counted, traced and watched": """
        custom_sigquit_handler log_level log_level_http log_requests log_requests_level
        log_requests_format log_requests_target uvicorn_access_log_exclude_prefixes
        crash_dump_folder show_time_cost enable_metrics enable_mfu_metrics
        enable_metrics_for_all_schedulers tokenizer_metrics_custom_labels_header
        tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token
        bucket_inter_token_latency bucket_e2e_request_latency collect_tokens_histogram
        prompt_tokens_buckets generation_tokens_buckets gc_warning_threshold_secs gc_threshold
        decode_log_interval enable_request_time_stats_logging kv_events_config
        load_snapshot_publish_interval load_publish_endpoint enable_forward_pass_metrics
        forward_pass_metrics_worker_id forward_pass_metrics_ipc_name enable_trace trace_modules
        otlp_traces_endpoint otlp_service_name export_metrics_to_file export_metrics_to_file_dir
        watchdog_timeout soft_watchdog_timeout dist_timeout sleep_on_idle
        enable_layerwise_nvtx_marker enable_nan_detection forward_hooks msprobe_dump_config
        debug_tensor_dump_output_folder debug_tensor_dump_layers debug_tensor_dump_input_file
        debug_tensor_dump_inject expert_distribution_recorder_mode
        expert_distribution_recorder_buffer_size enable_expert_distribution_metrics
        expert_balancedness_report_mode
    """,
    "memory and the order of work, which the worker follows": """
        mem_fraction_static max_running_requests max_queued_requests max_total_tokens
        chunked_prefill_size prefill_max_requests max_prefill_tokens prefill_decode_interval
        prefill_decode_interval_min_bs min_free_slots_delay schedule_policy
        schedule_conservativeness enable_priority_scheduling disable_priority_preemption
        default_priority_value abort_on_priority_when_disabled schedule_low_priority_values_first
        priority_scheduling_preemption_threshold retraction_policy page_size swa_full_tokens_ratio
        hybrid_kvcache_ratio disable_hybrid_swa_memory radix_eviction_policy
        radix_eviction_policy_config disable_radix_cache disable_chunked_prefix_cache
        enable_session_radix_cache enable_streaming_session enable_prefill_delayer
        prefill_delayer_max_delay_passes prefill_delayer_max_delay_ms
        prefill_delayer_token_usage_low_watermark prefill_delayer_queue_min_ratio
        prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets
        scheduler_recv_interval num_continuous_decode_steps enable_memory_saver
        enable_weights_cpu_backup cpu_offload_gb offload_group_size offload_num_in_group
        offload_prefetch_step offload_mode random_seed
    """,
    "what a request may ask for": """
        constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
        constrained_json_max_whitespace_cnt grammar_backend disable_outlines_disk_cache
        sampling_backend enable_custom_logit_processor enable_return_hidden_states
        return_hidden_states_mode sampling_mask_max_tokens enable_deterministic_inference
        rl_on_policy_target enable_mis
    """,
    "devices, and ranks that all have each row": """
        device base_gpu_id gpu_id_step numa_node tp_size dp_size load_balance_method
        prefill_round_robin_balance dist_init_addr nnodes node_rank nccl_port enable_nccl_nvls
        enable_symm_mem disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem pre_warm_nccl
        enable_p2p_check enable_quant_communications enable_flashinfer_allreduce_fusion
        enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend
        enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill
        disable_aiter_allreduce_fusion_in_decode enable_attn_tp_input_scattered
        enable_tp_lm_head_all_to_all disable_attn_tp_gather boundary_reduction
    """,
    "numbers and kernels, those of plain decoding": """
        dtype quantization quantization_param_path kv_cache_dtype prefill_kv_cache_dequant_dtype
        enable_fp32_lm_head modelopt_quant modelopt_checkpoint_restore_path
        modelopt_checkpoint_save_path modelopt_export_path quantize_and_serve rl_quant_profile
        torchao_config enable_tf32_matmul attention_backend prefill_attention_backend
        decode_attention_backend speculative_attention_mode nsa_prefill_backend nsa_decode_backend
        dsa_prefill_backend dsa_decode_backend dsa_paged_mqa_logits_backend dsa_topk_backend
        dsa_triton_union enable_dsa_fused_indexer enable_dsa_cache_layer_split dsv4_attn_backend
        dsv4_prefill_backend c128_page_size enable_deepseek_v4_fp4_indexer qsa_indexer_dtype
        bf16_gemm_backend fp8_gemm_runner_backend fp4_gemm_runner_backend
        disable_flashinfer_autotune flashinfer_autotune_skip_ops triton_attention_reduce_in_fp32
        triton_attention_num_kv_splits triton_attention_split_tile_size enable_lean_attention
        flashinfer_mla_disable_ragged enable_fused_qk_norm_rope enable_amd_monokernel
        enable_nvidia_megakernel enable_torch_compile enable_torch_compile_debug_mode
        torch_compile_max_bs enable_scattered_sconv ple_offload_embedding ple_offload_backend
        ple_offload_dir
    """,
    "CUDA graphs, those of plain decoding": """
        cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_max_bs
        cuda_graph_bs cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_bs_decode
        cuda_graph_bs_prefill cuda_graph_prefill_max_context cuda_graph_max_seq_len_prefill
        disable_cuda_graph disable_decode_cuda_graph disable_prefill_cuda_graph
        disable_cuda_graph_padding enable_breakable_cuda_graph enable_profile_cuda_graph
        enable_cudagraph_gc debug_cuda_graph disable_piecewise_cuda_graph
        enable_piecewise_cuda_graph enforce_piecewise_cuda_graph piecewise_cuda_graph_tokens
        piecewise_cuda_graph_compiler piecewise_cuda_graph_max_tokens record_nolora_graph
    """,
    "mixtures of experts, as in plain decoding": """
        ep_size moe_dp_size moe_a2a_backend moe_runner_backend moe_dense_tp_size
        flashinfer_mxfp4_moe_precision flashinfer_a2a_dispatch_type
        disable_flashinfer_cutlass_moe_fp4_allgather deepep_mode deepep_config deepep_v2_mode
        deepep_dispatcher_output_dtype fuseep_mode enable_waterfill enable_w4a4_mxfp4_megamoe
        enable_megamoe_for_layernorm_sp ep_num_redundant_experts ep_dispatch_algorithm
        init_expert_location enable_eplb eplb_algorithm eplb_rebalance_num_iterations
        eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold
        disable_shared_experts_fusion enforce_shared_experts_fusion enable_shared_experts_attn_tp
        shared_experts_tp_size enable_fused_moe_sum_all_reduce enable_single_batch_overlap
        enable_paged_experts paged_experts_num_resident kt_weight_path kt_method kt_cpuinfer
        kt_threadpool_count kt_num_gpu_experts kt_max_deferred_experts_per_token
    """,
    "LoRA adapters: each row has its request's": """
        enable_lora_overlap_loading max_lora_rank lora_target_modules max_loras_per_batch
        max_loaded_loras lora_eviction_policy lora_drain_wait_threshold lora_backend
        max_lora_chunk_size experts_shared_outer_loras lora_use_virtual_experts lora_strict_loading
    """,
    "Outrider's own": """
        speculative_algorithm speculative_draft_model_path speculative_num_steps
        speculative_num_draft_tokens
    """,
    "switched off, and the log says so": "enable_mixed_chunk",
    "0.5.11 refuses it with OUTRIDER, in host_0_5_11": "disable_overlap_schedule",
    "SGLang itself refuses it with any speculation, or with OUTRIDER": """
        dwdp_size enable_layernorm_sp enable_kv_cache_sharding prefill_only_disable_kv_cache
    """,
    "for models that are refused: state-space layers, sliding windows in a cache of their own": """
        max_mamba_cache_size mamba_ssm_dtype mamba_full_memory_ratio mamba_scheduler_strategy
        mamba_radix_cache_strategy mamba_track_interval mamba_max_states_per_path mamba_backend
        enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds
        enable_int8_mamba_checkpoint int8_mamba_ckpt_size linear_attn_backend
        linear_attn_decode_backend linear_attn_prefill_backend linear_attn_verify_backend
        enable_linear_replayssm linear_replayssm_cache_len enable_linear_replayssm_spec
        swa_prefix_tails enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay
    """,
    "for models that are refused: an encoder, images, sound": """
        enable_multimodal mm_attention_backend encoder_only language_only language_model_only
        encoder_transfer_backend encoder_urls encoder_bootstrap_port encoder_register_urls
        enable_adaptive_dispatch_to_encoder enable_broadcast_mm_inputs_process mm_process_config
        mm_enable_dp_encoder mm_processor_worker_num mm_io_worker_num mm_preprocess_cache_size_mb
        mm_global_cache_backend mm_feature_transport limit_mm_data_per_request
        enable_prefix_mm_cache enable_mm_global_cache keep_mm_feature_on_device
        disable_fast_image_processor image_processor_backend enable_precise_embedding_interpolation
        allowed_media_domains media_url_max_file_size_mb trust_mm_content_hashes
        asr_max_buffer_seconds asr_max_concurrent_sessions
    """,
    "for devices that Outrider does not run on": "mlx_enable_sampling",
    "read beside another flag alone, which is refused": """
        pp_max_micro_batch_size pp_async_batch_depth enable_dynamic_chunking
        enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_dense_mlp_attn_tp
        cp_strategy prefill_cp_mode nsa_prefill_cp_mode enable_cp_decode_attn_tp dcp_comm_backend
        dcp_replicate_q_proj tbo_token_distribution_threshold pdmux_config_path sm_group_num
        hisparse_config dllm_algorithm_config dllm_fdfo enable_page_major_kv_layout hicache_ratio
        hicache_size hicache_write_policy hicache_io_backend hicache_mem_layout
        hicache_storage_backend hicache_storage_prefetch_policy hicache_storage_backend_extra_config
        hicache_host_memory_mode hicache_host_memory_fraction
        hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts
        lmcache_config_file flexkv_config_file unified_cache_external_linker_backend
        unified_cache_external_linker_config enable_linker_mla_dedup disaggregation_transfer_backend
        disaggregation_bootstrap_port disaggregation_ib_device
        disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
        disaggregation_decode_polling_interval disaggregation_decode_retraction_backup
        disaggregation_decode_extra_slots disaggregation_decode_host_receive_threshold
        disaggregation_decode_allocation_policy disaggregation_enable_kv_checksum
        num_reserved_decode_tokens optimistic_prefill_attempts enable_pd_role_switch
        enable_elastic_expert_backup mooncake_ib_device elastic_ep_rejoin ep_join_mode
        ep_join_rank_offset elastic_ep_initial_size max_ep_size elastic_ep_scale_timeout
        kv_canary_sweep_interval kv_canary_real_data watermark_config
        return_aux_hidden_state_layer_ids
    """,
}
"""Names in SGLang's arguments, by the reason why they are passed on."""
