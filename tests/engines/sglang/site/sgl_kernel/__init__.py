"""Stands in for SGLang's GPU package on a machine without a GPU.

SGLang 0.5.11 imports one of its modules, `kvcacheio`, without asking for a device. Newer versions
also import functions whose names end in `_cpu`: none can be called. Every other name stays
missing, as SGLang expects on CPU.
"""

__version__ = "0.0.0+stand.in"


def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} needs a CPU build of sgl_kernel")

    return missing
