"""Models of headers only, and a server that says what it is told to."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from paper import QWEN_0_5B, QWEN_1_5B, TINY, shapes, write_safetensors


@pytest.fixture
def make(tmp_path):
    """Return a function that writes a model without data: make("name", config, shapes)."""

    def write(name: str, config: dict, tensors: dict | None = None, **more) -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        tensors = shapes(config) if tensors is None else tensors
        write_safetensors(path / "model.safetensors", tensors, **more)
        return path

    return write


@pytest.fixture
def qwen(make):
    """Return Qwen2.5 1.5B and 0.5B, without data."""
    from outrider.doctor.model import read_model

    paths = make("big", QWEN_1_5B), make("small", QWEN_0_5B)
    return tuple(read_model(str(path)) for path in paths)


@pytest.fixture
def tiny_copy(tmp_path):
    """Return a function that copies a tiny model and changes one of its files."""

    def copy(which: str, file: str, change) -> Path:
        path = tmp_path / f"{which}-changed"
        shutil.copytree(TINY / which, path)
        content = json.loads((path / file).read_text())
        change(content)
        (path / file).write_text(json.dumps(content))
        return path

    return copy


@pytest.fixture
def serve():
    """Return a function that serves JSON by path, and returns the address."""
    running = []

    def start(pages: dict, key: str | None = None) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                allowed = key is None or self.headers.get("Authorization") == f"Bearer {key}"
                found = self.path in pages
                self.send_response(200 if allowed and found else 404 if allowed else 401)
                self.end_headers()
                if allowed and found:
                    page = pages[self.path]
                    self.wfile.write(page if isinstance(page, bytes) else json.dumps(page).encode())

            def log_message(self, *args):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()
