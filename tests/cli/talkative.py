"""A server that tells everybody everything: its arguments, and the header that it was asked with.

In a package named `sglang` it is SGLang's launcher, as far as a command that starts one can see.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "clients"))

from test_engines import METRICS, Fake

TESTS = Path(__file__).resolve().parents[1]
TINY = str(TESTS.parent / "src" / "outrider" / "assets" / "tiny" / "target")


class Talkative(Fake):
    """Every page that a tool asks for. What it says of itself has the header and the arguments."""

    def do_GET(self):
        said = f"asked with {self.headers['Authorization']}"
        about = {
            "model_path": TINY,
            "tokenizer_path": TINY,
            "version": f"0.5.23 {said}",
            "speculative_algorithm": "OUTRIDER",
            "speculative_num_steps": 2,
            "attention_backend": f"triton {said}",
            "api_key": "planted by the server itself",
        }
        pages = {
            "/v1/models": {"object": "list", "data": [{"id": "m", "object": "model"}]},
            "/model_info": {"model_path": TINY},
            "/server_info": about,
            "/get_server_info": about,
            "/metrics": METRICS.encode(),
            "/health": {},
        }
        found = pages.get(self.path)
        self._send({"error": said} if found is None else found, 404 if found is None else 200)

    def do_POST(self):
        if self.path in ("/v1/chat/completions", "/v1/completions"):
            return super().do_POST()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/generate":
            said = {"output_ids": [7], "meta_info": {"finish_reason": {"type": "length"}}}
            return self._send(b"data: " + json.dumps(said).encode())
        texts = ["w" for _ in body.get("tokens", ())]
        said = {"/tokenize": {"tokens": [5], "count": 1}, "/detokenize": {"text": texts}}
        return self._send(said[self.path])


@contextmanager
def serving():
    """Yield the address of one, without http://."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Talkative)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


if __name__ == "__main__":
    given = sys.argv[1:]
    key = given[given.index("--api-key") + 1]
    sys.stdout.write(f"server_args=ServerArgs(given={given}, api_key={key!r})\n")
    sys.stdout.flush()
    port = int(given[given.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Talkative).serve_forever()
