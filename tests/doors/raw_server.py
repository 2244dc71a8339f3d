"""A server on loopback that answers with the bytes that it is given, HTTP or not."""

from __future__ import annotations

import json
import re
import socketserver
import threading
from contextlib import contextmanager


class RawServer(socketserver.ThreadingTCPServer):
    """Answers each path with bytes, or lets a function write to the connection.

    pages: by path; None is of all others
    heard: the head of each request
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pages = {}
        self.heard = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        """Say nothing: clients hang up."""


class _Handler(socketserver.StreamRequestHandler):
    def handle(self):
        lines = list(iter(self.rfile.readline, b"\r\n"))
        head = b"".join(lines).decode("latin-1")
        self.server.heard.append(head)
        if length := re.search(r"(?i)content-length: (\d+)", head):
            self.rfile.read(int(length[1]))
        path = head.split(" ")[1]
        reply = self.server.pages.get(path, self.server.pages.get(None, http(b"", 404)))
        if callable(reply):
            reply(self.connection)
        else:
            self.wfile.write(reply)


@contextmanager
def serving():
    server = RawServer()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def http(body, status=200, headers=""):
    """Return a whole answer."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode("utf-8", "surrogatepass") + body


def events(*pieces):
    """Return a stream of server-sent events, without a length."""
    return b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(b"data: " + piece + b"\n\n" for piece in pieces)
