"""What the scheduler of SGLang 0.5.11 calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outrider.engines.sglang.drafts.draft_model import make_draft_worker
from outrider.engines.sglang.versions.base import SglangVersion
from outrider.engines.sglang.workers.base import OutriderWorker


class Worker0511(OutriderWorker):
    """What the scheduler of 0.5.11 calls."""

    def __init__(
        self, version: SglangVersion, *, server_args: Any, target_worker: Any, **place: Any
    ) -> None:
        # place: the device, the port and the ranks, as SGLang's own workers take them
        self._load(version, target_worker, server_args)
        draft = make_draft_worker(self.version, target_worker, server_args, **place)
        self._begin(draft, place["tp_rank"], place["dp_rank"])
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
