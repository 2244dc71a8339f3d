"""What servers under test import: a custom logit processor, drafters and rules that misbehave."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import os
import sys
import time
from pathlib import Path

import torch

from outrider.core import Draft, PointMass, Proposal, chain
from outrider.drafters import NgramDrafter


def no_repeat_processor() -> str:
    """Return, as SGLang wants it, a processor that looks at the request's output so far."""
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    class NoRepeat(CustomLogitProcessor):
        """Forbids each of the last tokens to come again: its answer depends on every draft."""

        reads_text_only = True

        def __call__(self, logits, custom_param_list=None):
            for row, params in enumerate(custom_param_list):
                req = params["__req__"]
                text = req.origin_input_ids + req.output_ids  # as SGLang's own do
                output = text[len(req.origin_input_ids) :]
                logits[row, output[-params["window"] :]] = -float("inf")
            return logits

    return NoRepeat.to_str()


def counting_processor() -> str:
    """Return a processor whose answer depends on how often it was called."""
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    class Counting(CustomLogitProcessor):
        """Lets one token follow at every third call."""

        def __call__(self, logits, custom_param_list=None):
            for row, params in enumerate(custom_param_list):
                params["calls"] += 1
                if params["calls"] % 3 == 0:
                    logits[row] = -float("inf")
                    logits[row, 199] = 0.0
            return logits

    return Counting.to_str()


class Wrong(NgramDrafter):
    """Drafts tokens that are almost never right, as many as it may."""

    name = "wrong"

    def propose(self, requests, budget):
        return Proposal.of(
            [
                chain([(r.last_token + 7) % 256] * k)
                for r, k in zip(requests, budget.max_drafts, strict=True)
            ]
        )


class Forked(NgramDrafter):
    """Puts a wrong draft before each chain: what is accepted is never the first branch."""

    name = "forked"

    def propose(self, requests, budget):
        found = super().propose(requests, budget).drafts()
        for r, (draft, most) in enumerate(zip(found, budget.max_drafts, strict=True)):
            if budget.trees and len(draft.tokens) > 0 and most > 1:
                tokens = draft.tokens[: most - 1]
                wrong = (tokens[0] + 7) % 256
                parents = (-1, -1, *range(1, len(tokens)))
                found[r] = Draft((wrong, *tokens), parents, PointMass())
        return Proposal.of(found)


class Raising(NgramDrafter):
    """Raises in every second proposal."""

    name, calls = "raising", 0

    def propose(self, requests, budget):
        self.calls += 1
        if self.calls % 2:
            raise RuntimeError("no idea")
        return super().propose(requests, budget)


class Hanging(NgramDrafter):
    """Hangs for 5 seconds in its third proposal, and in one of 500 from then on."""

    name, calls = "hanging", 0

    def propose(self, requests, budget):
        self.calls += 1
        if self.calls % 500 == 3:
            time.sleep(5)
        return super().propose(requests, budget)


class OutOfRange(NgramDrafter):
    """Drafts ids that no vocabulary has."""

    name = "out_of_range"

    def propose(self, requests, budget):
        return Proposal.of([chain([10**9] * k) for k in budget.max_drafts])


class Writing(NgramDrafter):
    """Writes into the requests that it is given."""

    name = "writing"

    def propose(self, requests, budget):
        for request in requests:
            request.output.extend([1, 2, 3])
        return super().propose(requests, budget)


class Floats(NgramDrafter):
    """Returns something that is not token ids at all."""

    name = "floats"

    def propose(self, requests, budget):
        proposal = Proposal.of([chain([1] * k) for k in budget.max_drafts])
        object.__setattr__(proposal, "tokens", proposal.tokens.float() * torch.nan)
        return proposal


def register_faults():
    """Break the draft model, or SGLang, as $OUTRIDER_TEST_FAULT says.

    "oom", "nan": a pass now and then
    "once": the 20th pass
    "prefill": every prefill, so that all that the draft model reads it has to read later
    "device", "head": the 60th step with drafts that the device looks up, or that a head makes there
    "leak": one of the slots that are freed is not, once the file $OUTRIDER_TEST_PASSES exists
    a path: "oom", "nan", "prefill" or nothing, as that file says at the time

    To the file $OUTRIDER_TEST_PASSES each pass appends its mode and its number of tokens.

    $OUTRIDER_TEST_PATIENCE: seconds in which a tokenizer worker must answer uvicorn, which is 5:
    on a busy machine it imports SGLang for longer
    """
    if patience := os.environ.get("OUTRIDER_TEST_PATIENCE"):
        import uvicorn

        uvicorn.run.__kwdefaults__["timeout_worker_healthcheck"] = int(patience)
    said, path = os.environ.get("OUTRIDER_TEST_FAULT"), os.environ.get("OUTRIDER_TEST_PASSES")
    if not said:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    calls = itertools.count()

    def now():
        return Path(said).read_text() if os.sep in said else said

    def forward(original, self, batch):
        call, fault = next(calls), now()
        if path:
            with Path(path).open("a") as passes:
                passes.write(f"{batch.forward_mode.name} {len(batch.input_ids)}\n")
        logits = original(self, batch)
        if (call % 7 == 3 and fault == "oom") or (call == 20 and fault == "once"):
            raise torch.OutOfMemoryError("no room for the draft model")
        if call % 7 == 3 and fault == "nan":
            logits.fill_(torch.nan)
        return logits

    def prefill(original, self, batch):
        if now() == "prefill":
            raise torch.OutOfMemoryError("no room for the draft model")
        return original(self, batch)

    def free(original, self, slots):
        return original(self, slots[Path(path).exists() :])

    def rows(original, *args):
        if next(calls) == 60:
            raise torch.OutOfMemoryError("no room for drafts on the device")
        return original(*args)

    steps = {"device": "device.draft_rows", "head": "head_steps.unread_rows"}
    if said in steps:
        HookRegistry.register(f"outrider.serving.{steps[said]}", rows, HookType.AROUND)
        return
    if said == "leak":
        allocator = "sglang.srt.mem_cache.allocator.TokenToKVPoolAllocator"
        HookRegistry.register(f"{allocator}.free", free, HookType.AROUND)
        return
    model = "outrider.engines.sglang.drafts.draft_model.SglangDraftModel"
    HookRegistry.register(f"{model}._forward", forward, HookType.AROUND)
    HookRegistry.register(f"{model}.prefill", prefill, HookType.AROUND)


def register_clock():
    """Let the wall clock be off by as many seconds as the file $OUTRIDER_TEST_CLOCK says."""
    path, right = os.environ.get("OUTRIDER_TEST_CLOCK"), time.time
    if path:
        time.time = lambda: right() + float(Path(path).read_text() or 0)


def register_rank_faults():
    """Let rank 1 alone misbehave as $OUTRIDER_TEST_RANK_1 says.

    "raising": passes of the draft model, among them those of its prefill and of calibration, raise
    "perturbed": its sampler emits other tokens than that of rank 0
    """
    what = os.environ.get("OUTRIDER_TEST_RANK_1")
    if not what:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    calls = {"passes": itertools.count(), "prefills": itertools.count(), "run": itertools.count()}
    samples = itertools.count()
    kinds = itertools.cycle([torch.OutOfMemoryError, RuntimeError, torch.OutOfMemoryError])

    def is_rank_1():
        return torch.distributed.is_initialized() and torch.distributed.get_rank() == 1

    def breaks(what, when):
        def hook(original, self, *args):
            found = original(self, *args)
            if is_rank_1() and when(next(calls[what])):
                raise next(kinds)(f"{what} of rank 1")
            return found

        return hook

    def sample(original, *args, **options):
        tokens = original(*args, **options)
        if is_rank_1() and next(samples) % 3 == 1:
            tokens = (tokens + 1) % 100
        return tokens

    model = "outrider.engines.sglang.drafts.draft_model.SglangDraftModel"
    if what == "raising":
        for name, hook in (
            ("_forward", breaks("passes", lambda call: call % 13 == 12)),
            ("prefill", breaks("prefills", lambda call: call % 3 == 0)),
            ("run", breaks("run", lambda call: call == 1)),
        ):
            HookRegistry.register(f"{model}.{name}", hook, HookType.AROUND)
    else:
        target = "sglang.srt.layers.sampler.Sampler.forward"
        HookRegistry.register(target, sample, HookType.AROUND)


def register_retractions():
    """Let SGLang retract requests every so many passes, as $OUTRIDER_TEST_RETRACT says.

    A switch of SGLang's, which it reads as it is imported: our servers are forked after that.
    """
    every = os.environ.get("OUTRIDER_TEST_RETRACT")
    if not every:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def begin(scheduler, *args, **options):
        module = sys.modules[type(scheduler).__module__]
        module.TEST_RETRACT, module.TEST_RETRACT_INTERVAL = True, int(every)

    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.__init__", begin, HookType.BEFORE
    )


COLLECTIVES = ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "reduce_scatter")


def register_collectives():
    """Append each collective call of a rank to a file of its own in $OUTRIDER_TEST_COLLECTIVES."""
    folder = os.environ.get("OUTRIDER_TEST_COLLECTIVES")
    if not folder:
        return

    def logged(name, original):
        @functools.wraps(original)
        def call(tensor, *args, **options):
            group, first = options.get("group"), tensor[0] if isinstance(tensor, list) else tensor
            if torch.distributed.get_world_size(group) > 1:
                with Path(folder, f"rank-{torch.distributed.get_rank()}").open("a") as log:
                    log.write(f"{name} {[*first.shape]} {first.dtype}\n")
            return original(tensor, *args, **options)

        return call

    for name in COLLECTIVES:
        setattr(torch.distributed, name, logged(name, getattr(torch.distributed, name)))


def register_rules():
    """Verify as the file $OUTRIDER_TEST_RULE says, which a test may change while the server runs.

    "lenient": a draft is kept if it is among the target's two best
    "rounding": the logits of a pass with drafts are off by up to one spacing of bfloat16
    """
    path = os.environ.get("OUTRIDER_TEST_RULE")
    if not path:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    coins = torch.Generator().manual_seed(0)
    rule, best, drafted = "", [], []
    lenient = {}  # the two best tokens after each row, of steps in flight

    def choose_pass(original, self, batch, members, decision):
        drafted.append(decision.proposal)
        return original(self, batch, members, decision)

    def run(original, self, rows):
        nonlocal rule
        rule = Path(path).read_text() if drafted else ""
        found = original(self, rows)
        if rule == "lenient":
            lenient[id(drafted[-1])] = best
        drafted.clear()
        return found

    def sample(original, version, runner, output, *args):
        nonlocal best
        logits = output.next_token_logits
        if rule == "rounding":
            exponents = logits.float().abs().amax(-1, keepdim=True).log2().floor()
            steps = torch.randint(-1, 2, logits.shape, generator=coins)
            logits.copy_(logits.float() + steps * 2.0 ** (exponents - 7))
        best = logits.topk(2, dim=-1).indices.tolist()
        return original(version, runner, output, *args)

    def match(original, y, proposal):
        if (two := lenient.pop(id(proposal), None)) is not None:
            y = y.clone()
            for row, token in zip(proposal.parent_rows, proposal.tokens.tolist(), strict=True):
                if token in two[row]:
                    y[row] = token
        return original(y, proposal)

    for target, hook in (
        ("engines.sglang.engine.SglangEngine.choose_pass", choose_pass),
        ("engines.sglang.engine.SglangEngine.run", run),
        ("engines.sglang.engine.sample", sample),
        ("serving.step.match", match),
    ):
        HookRegistry.register(f"outrider.{target}", hook, HookType.AROUND)


class Unpinned:
    """torch, for modules that pin memory on a machine without a GPU."""

    def __getattr__(self, name):
        found = getattr(torch, name)
        if name not in ("arange", "empty", "tensor", "zeros"):
            return found
        return lambda *args, pin_memory=False, **options: found(*args, **options)


def register_unpinned():
    """Let LoRA run without a GPU, if $OUTRIDER_TEST_UNPINNED is set: SGLang pins its memory."""
    if not os.environ.get("OUTRIDER_TEST_UNPINNED"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def unpin(self, *args, **options):
        importlib.import_module("sglang.srt.lora.backend.torch_backend")
        for name, module in list(sys.modules.items()):
            if name.startswith("sglang.srt.lora") and hasattr(module, "torch"):
                module.torch = Unpinned()
        torch.Tensor.pin_memory = lambda self, *_: self

    manager = "sglang.srt.lora.lora_manager.LoRAManager.__init__"
    HookRegistry.register(manager, unpin, HookType.BEFORE)


def register_verify():
    """Let torch_native run TARGET_VERIFY, if $OUTRIDER_TEST_VERIFY names a file.

    SGLang runs it on GPU backends only. To the file each such pass appends its number of rows. If
    the file begins with "shifted", the logits of each row are those of the row before.
    """
    path = os.environ.get("OUTRIDER_TEST_VERIFY")
    if not path:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from outrider.engines.sglang.arguments import settings

    settings.VERIFYING.append("torch_native")

    def forward_extend(original, self, q, k, v, layer, batch, *args, **options):
        if batch.forward_mode.is_target_verify():
            batch = copy.copy(batch)
            width = batch.spec_info.draft_token_num
            batch.extend_prefix_lens = batch.seq_lens
            batch.extend_seq_lens = torch.full_like(batch.seq_lens, width)
            batch.seq_lens = batch.seq_lens + width
        return original(self, q, k, v, layer, batch, *args, **options)

    def launch(original, self, *args):
        result = original(self, *args)
        logits = result.logits_output.next_token_logits
        if Path(path).read_text().startswith("shifted"):
            logits.copy_(logits.roll(1, 0))
        with Path(path).open("a") as passes:
            passes.write(f"{len(logits)}\n")
        return result

    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(f"{backend}.forward_extend", forward_extend, HookType.AROUND)
    passes = "outrider.engines.sglang.verify_pass.VerifyPass"
    HookRegistry.register(f"{passes}._launch", launch, HookType.AROUND)
