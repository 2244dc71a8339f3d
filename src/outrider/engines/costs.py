"""What a model's pass takes on GPUs that people use, by figures that others published.

The simulated engine and the paced device of the tests (docs/paced.md) take their times from here.
Nothing here was measured by this project. This module imports nothing but the standard library.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import inf

Points = tuple[tuple[float, float], ...]
"""(number of rows, seconds), by rising numbers of rows."""


def seconds_at(points: Points, rows: float) -> float:
    """Return the seconds of so many rows: exact at points, linear between them.

    Beyond the last point the last slope continues. Before the first one, its seconds are returned.
    """
    after = bisect_left(points, (rows, 0.0))  # seconds are above 0: the first point not below rows
    if after == 0:
        return points[0][1]
    if after == len(points):
        after -= 1
    elif points[after][0] == rows:
        return points[after][1]
    (low, begin), (high, end) = points[after - 1 : after + 1]
    return begin + (end - begin) * (rows - low) / (high - low)


@dataclass(frozen=True)
class PassCost:
    """Seconds of one model's passes. They never fall as rows or tokens are added.

    rows: seconds of a pass by its number of rows, without cached tokens: see `seconds_at`
    kv: for each cached token that a decode pass reads
    prefill_row: for each token of a prefill pass, on top of the smallest pass. None: a token takes
        what a row of a decode pass takes
    """

    rows: Points
    kv: float
    prefill_row: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if the seconds are no curve of passes."""
        if len(self.rows) < 2:
            raise ValueError(f"a curve has two points or more: {self.rows}")
        before, least = -1.0, 0.0
        for rows, seconds in self.rows:
            if not before < rows < inf:
                raise ValueError(f"numbers of rows rise from 0 on: {rows} after {before}")
            if not 0 < seconds < inf:
                raise ValueError(f"seconds are above 0: {seconds} at {rows} rows")
            if seconds < least:
                raise ValueError(f"seconds never fall: {seconds} at {rows} rows, after {least}")
            before, least = rows, seconds
        for name, value in (("kv", self.kv), ("prefill_row", self.prefill_row or 0.0)):
            if not 0 <= value < inf:
                raise ValueError(f"{name} is 0 or more seconds: {value}")

    @property
    def fixed(self) -> float:
        """Seconds of the smallest pass, mostly for reading the weights."""
        return self.rows[0][1]

    def decode(self, rows: int, context: int) -> float:
        """Return the seconds of a decode pass. context: cached tokens that it reads"""
        return seconds_at(self.rows, rows) + self.kv * context

    def prefill(self, tokens: int) -> float:
        """Return the seconds of a prefill pass over so many tokens."""
        if self.prefill_row is None:
            return seconds_at(self.rows, tokens)
        return self.fixed + self.prefill_row * tokens


@dataclass(frozen=True)
class DeviceProfile:
    """A target and a draft model on a device.

    source: which figures were measured, by whom, and how the others were derived
    head: of one layer; None if its costs have not been derived
    """

    name: str
    source: str
    target: PassCost
    draft: PassCost
    head: PassCost | None = None


# -- curves that were derived


def line(fixed: float, row: float) -> Points:
    """Return a straight line: seconds of any pass, and for each of its rows."""
    # so far away that `fixed` is rounded off: the slope is `row`, to the last bit
    far = 2.0**80
    return (0, fixed), (far, row * far)


def roofline(floor: float, row: float) -> Points:
    """Return the longer of two times: reading the weights, and computing so many rows."""
    bend = floor / row
    return (1, floor), (bend, floor), (2 * bend, 2 * floor)


def scaled(points: Points, share: float, floor: float) -> Points:
    """Return the curve of a model with a share of the work, whose smallest pass takes `floor`."""
    smallest = points[0][1]
    return tuple((rows, floor + share * (seconds - smallest)) for rows, seconds in points)


# -- models of one GPU

SHARE_1B = 1.24 / 8.03
"""Parameters of Llama-3.2-1B, as a share of Llama-3.1-8B's."""

SHARE_HEAD = 0.35 / 8.03
"""Parameters of a head with one layer and an output of 32,000 tokens, as a share of the same."""

LAUNCH_BOUND = 2.1e-3
"""Seconds of a draft model's smallest pass: SpecDecode-Bench's figure for an EAGLE pass."""

TABLES = (
    "NVIDIA's aiconfigurator (Apache-2.0) publishes times of SGLang 0.5.14's kernels. The curve is "
    "the sum of the linear layers in bfloat16 at 1 / 64 / 256 / 512 / 1,024 rows"
)

DRAFTS_8B = (
    "Draft, derived: the 1B class; 2.1 ms for the smallest pass (SpecDecode-Bench's figure for an "
    "EAGLE pass: small passes are bound by launches, not by weights), what rows add by parameters "
    "(1.24 of 8.03 billion), kv by cache bytes (32 of 128 KiB a token). Head, derived: one layer "
    "and an output of 32,000 tokens, 0.35 of 8.03 billion parameters: "
)

ROWS_8B = ((1, 6.3e-3), (64, 6.3e-3), (256, 6.7e-3), (512, 10.4e-3), (1024, 20.1e-3))

H100_8B = DeviceProfile(
    name="h100-8b",
    source=(
        f"Llama-3.1-8B on one H100. Measured: {TABLES}: 6.3 / 6.2 / 6.7 / 10.4 / 20.1 ms. 6.2 is "
        "raised to 6.3, so that the curve never falls. Kv from the same tables, 39 ns a cached "
        "token: 128 KiB at 3.35 TB/s; SpecDecode-Bench fitted the same to vLLM. Norms, sampling "
        f"and launches are left out. {DRAFTS_8B}0.26 ms of reading weights, and as much again for "
        "launches; what rows add by parameters, kv one layer of 32."
    ),
    target=PassCost(ROWS_8B, kv=39e-9),
    draft=PassCost(scaled(ROWS_8B, SHARE_1B, LAUNCH_BOUND), kv=9.8e-9),
    head=PassCost(scaled(ROWS_8B, SHARE_HEAD, 0.5e-3), kv=1.2e-9),
)

H100_8B_LINE = DeviceProfile(
    name="h100-8b-line",
    source=(
        "Llama-3.1-8B on one H100, vLLM, as a straight line: the fit of SpecDecode-Bench, 5.9 ms + "
        "21 us a token + 39 ns a cached token. It overprices rows: measured kernels are flat to "
        "about 256 rows (see h100-8b). It is kept for results that were measured with it. Their "
        "further 1.2 ms a step is the engine's host time, and is left out. Draft: a model of the "
        "1B class, 2.1 ms a pass (their figure for an EAGLE pass: small passes are bound by "
        "launches, not by weights); row by parameters (1.24 of 8.03 billion), kv by cache bytes "
        "(32 of 128 KiB a token). Head: one layer and an output of 32,000 tokens, 0.35 of 8.03 "
        "billion parameters: 0.26 ms of reading weights, and as much again for launches; row by "
        "parameters, kv one layer of 32."
    ),
    target=PassCost(line(5.9e-3, 21e-6), kv=39e-9),
    draft=PassCost(line(2.1e-3, 3.2e-6), kv=9.8e-9),
    head=PassCost(line(0.5e-3, 1.0e-6), kv=1.2e-9),
)

ROWS_8B_H200 = ((1, 4.1e-3), (64, 4.3e-3), (256, 6.5e-3), (512, 12.4e-3), (1024, 20.5e-3))

H200_8B = DeviceProfile(
    name="h200-8b",
    source=(
        f"Llama-3.1-8B on one H200. Measured: {TABLES}: 4.1 / 4.3 / 6.5 / 12.4 / 20.5 ms. "
        "Kv from the same tables, 27 ns a cached token: 128 KiB at 4.8 TB/s. Norms, sampling and "
        f"launches are left out. {DRAFTS_8B}0.18 ms of reading weights, and the 0.26 ms for "
        "launches of h100-8b; what rows add by parameters, kv one layer of 32."
    ),
    target=PassCost(ROWS_8B_H200, kv=27e-9),
    draft=PassCost(scaled(ROWS_8B_H200, SHARE_1B, LAUNCH_BOUND), kv=6.8e-9),
    head=PassCost(scaled(ROWS_8B_H200, SHARE_HEAD, 0.44e-3), kv=0.84e-9),
)

# -- larger models

ROWS_70B = ((1, 13.0e-3), (64, 14.2e-3), (256, 15.6e-3), (512, 24.0e-3), (1024, 46.2e-3))

H100X4_70B = DeviceProfile(
    name="h100x4-70b",
    source=(
        f"Llama-3.1-70B on four H100, TP 4. Measured: {TABLES}: 13.0 / 14.2 / 15.6 / 24.0 / 46.2 "
        "ms. All-reduces, norms, sampling and launches are left out: the SSD paper reports 54.7 "
        "tokens/s of plain decoding at B = 1, which is 18.3 ms a step, host included. Kv, derived: "
        "39 ns for 128 KiB as in h100-8b, here 320 KiB a token spread over four GPUs. Draft: the "
        "1B class of h100-8b, on one GPU."
    ),
    target=PassCost(ROWS_70B, kv=24e-9),
    draft=H100_8B.draft,
)

MI300X_32B = DeviceProfile(
    name="mi300x-32b",
    source=(
        "Qwen3-32B on one MI300X: derived, as the longer of two times. Reading the weights: 24.0 "
        "ms, from published decoding with SGLang: 41.5 / 40.1 / 39.3 tokens/s a request at B = 1 / "
        "2 / 4 are 24.1 / 24.9 / 25.4 ms a step, host included (at 80 % of 5.3 TB/s the 65.6 GB "
        "would take 15.5 ms). Computing: 65.6 GFLOP a row at half of 1,307 TFLOPS, 100 us. They "
        "cross at 240 rows; a measured curve bends more softly. 24.4 tokens/s at B = 8, a step of "
        "41 ms, is left out, which favours large batches. Kv: 256 KiB of cache a token at 80 % of "
        "5.3 TB/s. Draft, derived likewise: Qwen3-4B, by parameters (4.0 of 32.8 billion) and "
        "cache bytes (144 of 256 KiB)."
    ),
    target=PassCost(roofline(24.0e-3, 100e-6), kv=62e-9),
    draft=PassCost(roofline(3.0e-3, 12e-6), kv=35e-9),
)

LAYERS_MOE = 48
LAYER_MOE = ((1, 42e-6), (4, 129e-6), (8, 170e-6), (32, 360e-6), (256, 446e-6))
"""Of the experts of one layer of Qwen3-30B-A3B, 8 of 128 for each token, on one H100."""

SHARE_DENSE_MOE = 1.22 / 7.50
"""Weights of Qwen3-30B-A3B that every pass reads, as a share of Llama-3.1-8B's: both with the
output, without the embedding."""

ROWS_MOE = tuple(
    (rows, LAYERS_MOE * seconds_at(LAYER_MOE, rows) + SHARE_DENSE_MOE * seconds_at(ROWS_8B, rows))
    for rows in (1, 4, 8, 32, 64, 256, 512, 1024)
)

H100_30B_A3B = DeviceProfile(
    name="h100-30b-a3b",
    source=(
        "Qwen3-30B-A3B on one H100, a mixture of experts. Measured: NVIDIA's aiconfigurator, "
        "kernels of SGLang 0.5.14: 42 / 129 / 170 / 360 / 446 us for the experts of one layer at "
        "1 / 4 / 8 / 32 / 256 rows, times 48 layers. More rows read more of the 128 experts, "
        "until about 32 rows read nearly all. Beyond 256 rows the last slope is an extrapolation. "
        "Derived: the other linear layers (attention and output, 1.22 billion weights) take what "
        "h100-8b takes for its 7.50 billion, by weights. Small kernels reach less, and norms, "
        "routing, sampling and launches are left out, so a small pass takes longer in truth. Kv: "
        "96 KiB of cache a token at 3.35 TB/s. Draft: the 1B class of h100-8b."
    ),
    target=PassCost(ROWS_MOE, kv=29e-9),
    draft=H100_8B.draft,
)

PROFILES = {
    profile.name: profile
    for profile in (H100_8B, H100_8B_LINE, H200_8B, H100X4_70B, MI300X_32B, H100_30B_A3B)
}
"""All profiles by name."""
