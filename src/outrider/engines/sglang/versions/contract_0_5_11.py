"""What we rely on in SGLang 0.5.11, beside what is in `contract_common`."""

from __future__ import annotations

from outrider.engines.sglang.versions import contract_common as common

VERSION = "0.5.11"

_MIXIN = "managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin"

HOOKS: dict[str, str] = common.HOOKS | {
    "managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin.save_remote_model": (
        "self params"
    ),
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
    f"{_MIXIN}.stream_output_generation": "self reqs return_logprob skip_req is_idle_batch",
    "managers.schedule_batch.ScheduleBatch.get_model_worker_batch": "self seq_lens_cpu_cache",
    f"{_MIXIN}._resolve_spec_overlap_token_ids": "self result batch",
    f"{_MIXIN}.process_batch_result_prefill": "self batch result",
    "managers.overlap_utils.FutureMap.resolve_future": "self model_worker_batch",
    "managers.overlap_utils.FutureMap.store_to_map": "self future_indices batch_result",
    "model_executor.cuda_graph_runner.CudaGraphRunner.can_run": "self forward_batch",
    "model_executor.model_runner.ModelRunner.init_aux_hidden_state_capture": "self",
    "layers.utils.hash.murmur_hash32": "seed positions col_indices",
}
"""What we hook, with its parameters."""

CALLS: dict[str, str] = common.CALLS | {
    "mem_cache.allocator.BaseTokenToKVPoolAllocator.available_size": "self",
    "mem_cache.allocator.BaseTokenToKVPoolAllocator.free": "self free_index",
    "configs.model_config.ModelConfig.from_server_args": (
        "server_args model_path model_revision is_draft_model **"
    ),
    "server_args.get_global_server_args": "",
    "server_args.add_attention_backend_choices": "choices",
    "server_args.add_deterministic_attention_backend_choices": "choices",
    "server_args.add_radix_supported_deterministic_attention_backend_choices": "choices",
    f"{common.BACKEND}.init_forward_metadata_capture_cuda_graph": (
        "self bs num_tokens req_pool_indices seq_lens encoder_lens forward_mode spec_info"
    ),
    f"{common.BACKEND}.init_forward_metadata_replay_cuda_graph": (
        "self bs req_pool_indices seq_lens seq_lens_sum encoder_lens forward_mode spec_info "
        "seq_lens_cpu"
    ),
    "layers.dp_attention.get_attention_tp_size": "",
    "layers.logits_processor.LogitsProcessor._compute_lm_head": (
        "self hidden_states lm_head embedding_bias"
    ),
    "layers.sampler.Sampler.forward": (
        "self logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs "
        "positions"
    ),
    "managers.schedule_batch.Req.check_finished": "self new_accepted_len",
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
    "model_executor.forward_batch_info.ForwardBatch.init_new": "cls batch model_runner",
    "model_executor.model_runner.ModelRunner._preprocess_logits": (
        "self logits_output sampling_info"
    ),
    "sampling.sampling_batch_info.SamplingBatchInfo.copy_for_forward": "self",
    "speculative.dflash_info.DFlashVerifyInput.__init__": (
        "self draft_token positions draft_token_num topk custom_mask capture_hidden_mode "
        "num_tokens_per_batch"
    ),
    "utils.common.freeze_gc": "context",
}
"""What we call, with its parameters."""

NAMES = common.NAMES
"""What we import, override or call without parameters."""

FIELDS: dict[str, str] = common.extended(
    common.FIELDS,
    {
        "managers.schedule_batch.ModelWorkerBatch": (
            "forward_mode input_ids req_pool_indices seq_lens out_cache_loc seq_lens_cpu "
            "seq_lens_sum top_logprobs_nums token_ids_logprobs sampling_info orig_seq_lens "
            "spec_info reqs return_logprob capture_hidden_mode is_extend_in_batch "
            "extend_num_tokens extend_seq_lens extend_prefix_lens extend_logprob_start_lens "
            "multimodal_inputs is_prefill_only"
        ),
        "managers.utils.GenerationBatchResult": (
            "num_accepted_drafts num_accepted_drafts_per_req_cpu"
        ),
        "sampling.sampling_batch_info.SamplingBatchInfo": "vocab_mask",
    },
)
"""What we read or replace in the host's dataclasses."""

ATTRIBUTES: dict[str, str] = common.extended(
    common.ATTRIBUTES,
    {
        "managers.schedule_batch.Req": (
            "kv_committed_len kv_allocated_len spec_accepted_drafts req_pool_idx "
            "input_token_logprobs temp_input_token_ids_logprobs_val "
            "temp_input_token_ids_logprobs_idx"
        ),
        _MIXIN: "server_args",
        "managers.overlap_utils.FutureMap": "spec_algo",
        "managers.scheduler.Scheduler": "draft_worker",
        "sampling.sampling_params.SamplingParams": "custom_params stop_strs stream_interval",
        "model_executor.model_runner.ModelRunner": "use_ngram_embedding graph_runner",
    },
)
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
