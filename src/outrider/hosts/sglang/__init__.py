"""Outrider inside SGLang: `--speculative-algorithm OUTRIDER`.

SGLang finds `register` by its entry point, `sglang.srt.plugins`. Read in this order:

* `plugin`: the hooks, and what happens at start-up
* `contract`: every name of SGLang that we rely on, for one version of it
* `guest`: what happens in any other version: nothing, or a refusal
* `profile`: what a user can set, for the server and for a request
* `worker`: the loop, by the contract that SGLang has without overlap
* `overlap`: the same loop under overlap: a step is launched before the last one is known
* `roster`, `drafting`: SGLang's requests as drafters see them, and the server's drafters
* `flush`, `explain`: streams in chunks of a fixed size; what each step did, for those who ask
* `rows`: a verify pass as a decode batch with one row for each token; the host's own sampler
* `row_limits`, `memory`: how many rows a pass may have, and what they take
* `draft_model`: the draft in SGLang's own `TpModelWorker`
* `metrics`, `tracing`: what it tells of itself, as Prometheus counters and OpenTelemetry spans
* `attention`, `attention_triton`: the attention backend `outrider`
* `cpu`: what SGLang lacks on CPU
* `rocm`: a repair of SGLang's own speculation on ROCm, for those who ask for it
"""
