"""What a pass costs on devices that people use, by public figures.

None of these was measured by this project. A step of the target takes `fixed`, `row` for each row
of the batch, and `kv` for each cached token of each request, which is read once for all rows of the
request, as multi-query verification does.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PassCost:
    """Seconds of one model's passes.

    fixed: of any pass: reading the weights
    row: for each row of a decode pass
    kv: for each cached token of each request of a decode pass
    prefill_row: for each token of a prefill pass
    """

    fixed: float
    row: float
    kv: float
    prefill_row: float

    def decode(self, rows: int, context: int) -> float:
        """Return the seconds of a decode pass. context: cached tokens, each request's once."""
        return self.fixed + self.row * rows + self.kv * context

    def prefill(self, rows: int) -> float:
        """Return the seconds of a prefill pass over so many tokens."""
        return self.fixed + self.prefill_row * rows


@dataclass(frozen=True)
class CostProfile:
    """A target and a draft model on a device.

    source: where the figures come from, and what was derived from them
    head: of one layer; None if nobody has derived it
    """

    name: str
    source: str
    target: PassCost
    draft: PassCost
    head: PassCost | None = None


H100_8B = CostProfile(
    name="h100-8b",
    source=(
        "Llama-3.1-8B on one H100, vLLM: the fit of SpecDecode-Bench, 5.9 ms + 21 us a token + "
        "39 ns a cached token. Their further 1.2 ms a step is the engine's host time: left out, "
        "because here the host is real. Draft: a model of the 1B class, 2.1 ms a pass (their "
        "figure for an EAGLE pass: small passes are bound by launches, not by weights); row by "
        "parameters (1.24 of 8.03 billion), kv by cache bytes (32 of 128 KiB a token). Head: one "
        "layer and an output of 32,000 tokens, 0.35 of 8.03 billion parameters: 0.26 ms of reading "
        "weights, and as much again for launches; row by parameters, kv one layer of 32."
    ),
    target=PassCost(fixed=5.9e-3, row=21e-6, kv=39e-9, prefill_row=21e-6),
    draft=PassCost(fixed=2.1e-3, row=3.2e-6, kv=9.8e-9, prefill_row=3.2e-6),
    head=PassCost(fixed=0.5e-3, row=1.0e-6, kv=1.2e-9, prefill_row=1.0e-6),
)

H100X4_70B = CostProfile(
    name="h100x4-70b",
    source=(
        "Llama-3.1-70B on four H100: fixed from the 54.7 tokens/s of plain decoding at B = 1 that "
        "the SSD paper reports (18.3 ms a step, host included). Row and kv are those of h100-8b by "
        "work: 141 of 16 GFLOP a token and 320 of 128 KiB of cache a token, spread over four GPUs. "
        "Draft: the 1B class of h100-8b, on the same GPUs."
    ),
    target=PassCost(fixed=18.2e-3, row=46e-6, kv=24e-9, prefill_row=46e-6),
    draft=PassCost(fixed=2.1e-3, row=3.2e-6, kv=9.8e-9, prefill_row=3.2e-6),
)

MI300X_32B = CostProfile(
    name="mi300x-32b",
    source=(
        "Qwen3-32B on one MI300X, SGLang: 41.5 / 40.1 / 39.3 tokens/s a request at B = 1 / 2 / 4 "
        "are 24.1 / 24.9 / 25.4 ms a step, so fixed = 24.0 ms. (24.4 tokens/s at B = 8 is a jump "
        "that no straight line has; it is left out, which favours large batches.) Row: 65.6 GFLOP "
        "at half of 1,307 TFLOPS. kv: 256 KiB of cache a token at 80 % of 5.3 TB/s. Draft: "
        "Qwen3-4B, by parameters (4.0 of 32.8 billion) and cache bytes (144 of 256 KiB)."
    ),
    target=PassCost(fixed=24.0e-3, row=100e-6, kv=62e-9, prefill_row=100e-6),
    draft=PassCost(fixed=3.0e-3, row=12e-6, kv=35e-9, prefill_row=12e-6),
)

PROFILES = {profile.name: profile for profile in (H100_8B, H100X4_70B, MI300X_32B)}
