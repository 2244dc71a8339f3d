"""Stands in for SGLang's GPU package on a machine without a GPU.

SGLang 0.5.11 imports one of its modules, `kvcacheio`, without asking for a device. Every other name
stays missing, as SGLang expects on CPU.
"""

__version__ = "0.0.0+stand.in"
