"""Races between streams, on a machine without a device: happens-before with vector clocks.

CPU streams do nothing, so what a missing wait breaks on a GPU is invisible here. This detector
gives torch's CPU streams and events identity and clocks, and looks at every operation of a thread:

* An operation runs on the stream that is current. It comes after all that ran on this stream
  before it, after what the stream waited for, and after what the CPU waited for before the launch.
* What an operation reads and writes is known from its schema. Tensors that are written or read in
  parts are followed cell by cell: indexing by tensors touches the cells that it names.
* Two operations race if both touch a cell, one of them writes, and neither comes after the other.

A race is reported if our own code has part in it and the tensor is the device's. What the device's
is starts with what SGLang gives the worker, and follows the operations. Our own code is told that
the device is LABEL, which is no CPU: it takes the paths that it takes on a GPU. SGLang still sees
its CPU.

Reads that wait (`tolist`, `.cpu()`, ...) count as waits of the CPU if our own code does them.
SGLang's do not: what it does on a CPU stands for kernels that do not wait.

$OUTRIDER_TEST_RACES names a JSON file: {"log": file, "plant": a fault of PLANTS, "fence": whether
SGLang has its fence, as on CUDA}. A server then writes what it finds to the log when it is idle.
"""
