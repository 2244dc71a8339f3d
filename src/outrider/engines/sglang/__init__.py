"""Outrider inside SGLang: `--speculative-algorithm OUTRIDER`.

SGLang finds `plugin.register` by its entry point, `sglang.srt.plugins`. The served step itself is
in `outrider.serving`, which knows no engine. Read in this order:

* `plugin`: what happens at start-up
* `versions`: what differs between versions of SGLang, and a contract for each: the names that we
  rely on, and the check; `guest`: what happens in any other version
* `hooks`: what SGLang is hooked by: `common` in all versions, and a file for each version
* `workers`: what SGLang's schedulers call; `base` makes the parts of the served step
* `engine`: SGLang as the served step sees it: lays rows out, launches passes, waits for them
* `batches`: every pass as a decode batch of SGLang's; `verify_pass`: SGLang's own TARGET_VERIFY
* `carried`, `slots`: what a batch carries from step to step, and how many KV slots it holds
* `requests`, `finish`: SGLang's requests as the served step sees them, and what an outcome means
  to them
* `sampling`: what SGLang's own sampler emits at each row, with penalties and grammars
* `drafts`: draft models and heads, whose states are in the target's slots
* `attention`: the attention backend `outrider`
* `arguments`: SGLang's flags, what is refused, and what memory is reserved
* `intake`, `answers`: what requests may hold, and what an answer says about drafts
* `sanitizer`: the check of every KV slot that is read, for tests
* `rocm`: a repair of SGLang's own speculation on ROCm, off unless $OUTRIDER_REPAIR asks for it
"""
