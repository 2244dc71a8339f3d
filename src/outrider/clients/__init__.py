"""Whatever answers prompts, seen from outside: the tools ask engines and compare what they say.

`base.py` says what is asked and answered, `server.py` speaks to any server with OpenAI's API,
`local.py` runs Transformers in this process, `models.py` loads its models,
`chat.py` runs their chat templates. An engine is named by a
string:

    http://127.0.0.1:30000                       a server
    http://127.0.0.1:30000#drafter=suffix        Outrider's server, with options for each request
    http://127.0.0.1:8080#{"cache_prompt": false}    fields of the request's body, for any server
    transformers:MODEL                           Transformers' own generation
    transformers:MODEL#draft=MODEL               Outrider in Transformers, with a draft model
    transformers:MODEL#mode=assisted,draft=MODEL Transformers' own speculation

Importing this package needs nothing but the standard library.
"""

from outrider.clients.base import (
    Answer,
    Counts,
    Engine,
    Query,
    Refused,
    Token,
    base_url,
    shown_url,
)
from outrider.clients.chat import render_chat
from outrider.clients.models import (
    check_drafter,
    check_target,
    draft_kind,
    load_model,
    load_tokenizer,
)
from outrider.clients.names import both_modes, open_engine

__all__ = [
    "Answer",
    "Counts",
    "Engine",
    "Query",
    "Refused",
    "Token",
    "base_url",
    "both_modes",
    "check_drafter",
    "check_target",
    "draft_kind",
    "load_model",
    "load_tokenizer",
    "open_engine",
    "render_chat",
    "shown_url",
]
