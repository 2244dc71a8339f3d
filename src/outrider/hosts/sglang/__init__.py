"""Outrider inside SGLang: `--speculative-algorithm OUTRIDER`.

SGLang finds `register` by its entry point, `sglang.srt.plugins`. Read in this order:

* `plugin`, `hooks`: what happens at start-up, and the hooks that every version gets
* `host`: what differs between versions of SGLang, and a file for each that says how it is there
* `contract`: every name of SGLang that we rely on, a file for each version, and the check
* `guest`: what happens in any other version: nothing, or a refusal
* `profile`, `settings`, `flags`: what a user can set, and which of SGLang's flags are refused
* `worker`: the loop: a step is launched before the last one is known
* `flights`: steps that were launched, and what a batch carries from one to the next
* `reserve`: how many KV slots each request holds before a step
* `requests`, `request_table`: SGLang's requests as drafters see them
* `drafting`: the server's drafters
* `flush`, `explain`: streams in chunks of a fixed size; what each step did, for those who ask
* `rows`: a verify pass as a decode batch with one row for each token
* `sampling`, `penalties`, `grammars`: what the host's own sampler would emit at each row
* `row_limits`, `memory`: how many rows a pass may have, and what they take
* `verify_pass`: drafts verified by rows, or by SGLang's TARGET_VERIFY
* `draft_model`: the draft in SGLang's own `TpModelWorker`
* `heads`, `slot_heads`, `slot_blocks`: heads, whose states and keys are in the target's slots
* `on_device`, `head_steps`: drafts that the device makes before the last step is known
* `metrics`, `tracing`: what it tells of itself, as Prometheus counters and OpenTelemetry spans
* `sanitizer`, `shadow`: the check of every KV slot that is read, for tests
* `attention`, `attention_triton`: the attention backend `outrider`
* `cpu`: what SGLang lacks on CPU
* `rocm`: a repair of SGLang's own speculation on ROCm, for those who ask for it
"""
