"""Kernels in Triton's interpreter: set before any of them is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

pytest.importorskip("triton")
from outrider.kernels import interpreter


def _poisoned(make):
    """Fill what `torch.empty` returns, so that reading it before writing shows."""

    def empty(*args, **kwargs):
        out = make(*args, **kwargs)
        if out.is_floating_point():
            return out.fill_(float("nan")) if out.element_size() > 1 else out
        return out if out.dtype == torch.bool else out.fill_(torch.iinfo(out.dtype).max)

    return empty


IN_ORDER = pytest.param(None, marks=pytest.mark.slow)
"""Selftest runs kernels in this order. Shuffled programs also find those that wait for others."""


@pytest.fixture(params=[IN_ORDER, 1], ids=["in order", "shuffled"])
def interpreted(request, monkeypatch):
    """Kernels run in the checked interpreter, over scratch that holds no accidental zeros."""
    for home, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(home, name, _poisoned(getattr(home, name)))
    with interpreter.checked(shuffle=request.param):
        yield
