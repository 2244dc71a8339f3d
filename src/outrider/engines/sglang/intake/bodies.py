"""Bodies that SGLang's validators trip over: refused with status 400, as all others are."""

from __future__ import annotations

import traceback
from typing import Any

from outrider.engines.sglang.intake.fields import shown

KINDS = (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, AssertionError)
"""What code raises that reads JSON of another form than it expects. FastAPI answers with 500."""

READS = "request_body_to_args"
"""FastAPI's function that makes a request of a body."""


def refuse_unread(app: Any) -> None:
    """Answer with 400 what is raised while FastAPI reads a body; nothing else is touched."""
    from fastapi.responses import JSONResponse

    async def answer(request: Any, error: Exception) -> Any:
        if not _was_reading(error):
            raise error
        message = f"the request cannot be read ({shown(f'{type(error).__name__}: {error}')})"
        found = {"object": "error", "message": message, "type": "BadRequestError", "code": 400}
        return JSONResponse(found, 400)

    for kind in KINDS:
        app.add_exception_handler(kind, answer)
    app.middleware_stack = None  # it is built again, with these


def _was_reading(error: Exception) -> bool:
    codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(code.co_name == READS and "fastapi" in code.co_filename for code in codes)
