"""What work between passes costs on a GPU, on the CPU and on the device.

None of these was measured by this project. They are round figures for PyTorch on an H100.
"""

from __future__ import annotations

from dataclasses import dataclass

LAUNCH = 5e-6
"""CPU seconds of an operation that launches one kernel: Python, PyTorch's dispatcher, and
`cudaLaunchKernel`, of which the last is 2-3 us. Public figures for eager PyTorch are 4-10 us."""

VIEW = 1.5e-6
"""CPU seconds of an operation that launches nothing: a slice, a reshape, a cast to its own type."""

ASK = 0.3e-6
"""CPU seconds of asking for a shape, a length or a type."""

GRAPH = 10e-6
"""CPU seconds of launching a pass that was captured as a CUDA graph. NVIDIA gives 2.5 us for the
call and about 1 ns for each node since CUDA 12.6, and several times that before."""

GRAPH_INPUTS = 8
"""Launches before that one: token ids, positions, lengths, slots and rows of the table are copied
to where the graph reads them, and the attention backend prepares its lengths and page table."""

KERNEL = 2.5e-6
"""Device seconds of the smallest kernel, with the gap before the next one. 2-3 us on an H100."""

LOGITS = 128_256 * 4
"""Bytes of a row of logits, which argmax reads: the vocabulary of Llama 3.1, in float32. The paced
device's own vocabulary is smaller, and its logits are not there."""

BANDWIDTHS = {"h100": 3.35e12, "mi300x": 5.3e12}
"""Peak bytes a second of device memory, by the first part of a profile's name (data sheets)."""


@dataclass(frozen=True)
class Prices:
    """What the device's work costs. All times in seconds.

    launch: CPU time of a kernel's launch
    view: CPU time of an operation that launches nothing
    ask: CPU time of what is known of a tensor without its values
    graph: CPU time of a pass's launch, beside `graph_inputs` launches of kernels
    kernel: device time of a kernel, beside `bandwidth` bytes a second that it reads and writes
    """

    launch: float = LAUNCH
    view: float = VIEW
    ask: float = ASK
    graph: float = GRAPH
    graph_inputs: int = GRAPH_INPUTS
    kernel: float = KERNEL
    bandwidth: float = BANDWIDTHS["h100"]

    @property
    def launch_of_pass(self) -> float:
        """Return the CPU seconds of launching a pass."""
        return self.graph + self.graph_inputs * self.launch

    def on_device(self, kernels: int, num_bytes: int) -> float:
        """Return the device seconds of kernels that read and write so many bytes together."""
        return kernels * self.kernel + num_bytes / self.bandwidth


def prices_of(profile: str) -> Prices:
    """Return the prices of a cost profile's device. Unknown devices have an H100's memory."""
    device = profile.partition("-")[0].partition("x4")[0]
    return Prices(bandwidth=BANDWIDTHS.get(device, BANDWIDTHS["h100"]))
