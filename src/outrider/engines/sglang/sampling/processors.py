"""Custom logit processors: functions of a client's that change a row's logits.

SGLang calls one once for each token. With drafts it is called for each row, for drafts that are
rejected too. That is the same for a processor that reads its parameters and the request's tokens,
and nothing else; one that counts its calls would count others. So a request has drafts only if its
processor is one of SGLang's own, or says that it reads nothing else: `reads_text_only = True`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from sglang.srt.sampling import custom_logit_processor

REQUEST = "__req__"
"""Where SGLang puts the request, among the parameters of its processor."""


def reads_text_only(serialized: str) -> bool:
    """Say whether a processor depends on its parameters and the request's tokens alone."""
    try:
        processor = custom_logit_processor.CustomLogitProcessor.from_str(serialized)
    except Exception:  # SGLang meets the same, and says it
        return False
    is_sglangs = type(processor).__module__ == custom_logit_processor.__name__
    return is_sglangs or getattr(processor, "reads_text_only", False) is True


class _Kept(dict[str, Any]):
    """Parameters for one call. What the processor writes into them is kept with the request's."""

    def __init__(self, params: dict[str, Any], req: Any) -> None:
        super().__init__({**params, REQUEST: req})
        self._params = params

    def keep(self) -> None:
        """Write it to the request's own."""
        req = self._params[REQUEST]
        self._params.clear()
        self._params.update({**self, REQUEST: req})


def row_params(params: Any, request: Any, path: Sequence[int]) -> Any:
    """Return a request's parameters, with a request that has emitted the drafts on a row's path."""
    if not isinstance(params, dict) or REQUEST not in params:
        return params
    req = copy.copy(params[REQUEST])
    req.output_ids = req.output_ids[:0]  # an array in 0.5.23, which processors add to another one
    req.output_ids.extend([*request.output, *path])
    return {**params, REQUEST: req} if request.max_drafts else _Kept(params, req)


def keep_params(info: Any) -> None:
    """Keep what processors wrote into the parameters of requests that have no drafts."""
    for params in info.custom_params or ():
        if isinstance(params, _Kept):
            params.keep()
