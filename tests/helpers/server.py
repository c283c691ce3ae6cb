"""A small OpenAI-compatible server on this machine, whose answers a test decides."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class Refusal(Exception):
    """(status, body) of an answer that is an error; a ValueError stands for status 400."""


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[dict], Any]], str]]:
    """Starts a server whose answers come from a function of the request; gives its address."""
    servers = []

    def start(answer: Callable[[dict], Any]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    status, reply = 200, answer(body)
                except Refusal as refusal:
                    status, reply = refusal.args
                except ValueError as error:
                    status, reply = 400, {"error": str(error)}
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_args): ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}/v1"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()
