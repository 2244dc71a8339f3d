"""What the scheduler of SGLang 0.5.11 calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outrider.engines.sglang.drafts.draft_model import make_draft_worker
from outrider.engines.sglang.versions.sglang_0_5_11 import Sglang0511
from outrider.engines.sglang.workers.base import OutriderWorker


class Worker0511(OutriderWorker):
    """What the scheduler of 0.5.11 calls."""

    def __init__(
        self,
        server_args: Any,
        gpu_id: int,
        tp_rank: int,
        dp_rank: int | None,
        moe_ep_rank: int,
        attn_cp_rank: int,
        moe_dp_rank: int,
        nccl_port: int,
        target_worker: Any,
    ) -> None:
        self._load(Sglang0511(), target_worker, server_args)
        draft = make_draft_worker(
            self.version,
            target_worker,
            server_args,
            gpu_id=gpu_id,
            tp_rank=tp_rank,
            dp_rank=dp_rank,
            moe_ep_rank=moe_ep_rank,
            attn_cp_rank=attn_cp_rank,
            moe_dp_rank=moe_dp_rank,
            nccl_port=nccl_port,
        )
        self._begin(draft, tp_rank, dp_rank)
        self.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens
        # the scheduler looks for a draft model's cache here
        self.draft_worker = SimpleNamespace(draft_runner=self.model_runner)

    def forward_batch_generation(self, plain: Any) -> Any:
        """Launch one pass."""
        batch = plain.outrider_batch
        if plain.forward_mode.is_extend():
            mend_prompt_logprobs(plain)
        result = self._launch(batch, plain)
        if plain.forward_mode.is_decode():
            batch.seq_lens_cpu = result.next_draft_input.lens_cpu
        return result


def mend_prompt_logprobs(plain: Any) -> None:
    """Keep 0.5.11 from ending the scheduler when prompts with `token_ids_logprob` are read.

    It fails beside a prompt with logprobs that names no tokens. And a request that is retracted
    while its prompt is read keeps the logprobs of the first attempt: then there are too many.
    """
    asked = plain.token_ids_logprobs or ()
    if all(tokens is None for tokens in asked):
        return
    plain.token_ids_logprobs = [tokens or [] for tokens in asked]
    for req in plain.reqs:
        if req.input_token_logprobs is None:  # none of its prompt is done
            req.temp_input_token_ids_logprobs_val = None
            req.temp_input_token_ids_logprobs_idx = None
