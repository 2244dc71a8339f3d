"""Copies between host and GPU: every name is there, and none can be called."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.kvcacheio.{name} needs a GPU")

    return missing
