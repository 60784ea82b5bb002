"""A local hub: a real HTTP server that answers requests for config.json as the Hugging Face hub does."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

QWEN3_06B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
"""The config.json of Qwen/Qwen3-0.6B, which has 596,049,920 parameters."""


@contextmanager
def hub(**models: dict[str, Any]) -> Iterator[str]:
    """The address of a hub that holds these models, by name with `__` for `/`. A model called
    `org/gated` is gated, `org/broken` answers 503; an unknown one is answered 401, as the hub does."""
    known = {name.replace("__", "/"): json.dumps(config) for name, config in models.items()}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, _, file = self.path.strip("/").partition("/resolve/main/")
            if name in known and file == "config.json":
                self._answer(200, known[name])
            elif name == "org/gated":
                self._answer(403, "gated", code="GatedRepo")
            elif name == "org/broken":
                self._answer(503, "later")
            else:
                self._answer(401, "Invalid username or password.", code="RepoNotFound")

        def do_HEAD(self) -> None:
            self._answer(200, "")

        def _answer(self, status: int, text: str, *, code: str | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            if code:
                self.send_header("X-Error-Code", code)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
