"""A git server over HTTP: git's own `http-backend` behind a small server that can also fail."""

import base64
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit


class GitServer:
    """Serves the repositories below `root`. A `status` other than 200 is answered instead. Transfers of
    commits (protocol version 2) wait for `held`; `transferring` is set while one waits. With `login`
    (user:token) others get 401, and with `moved_to` everybody is sent to that server. `heard` are the
    logins that were sent, and `message` is the text of an answer that refuses one."""

    def __init__(self, root: Path, port: int = 0) -> None:
        self.root = root
        self.status = 200
        self.held: threading.Event | None = None
        self.transferring = threading.Event()
        self.login: str | None = None
        self.moved_to: str | None = None
        self.heard: list[str] = []
        self.message = ""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.answer(self)

            def do_POST(self) -> None:
                outer.answer(self)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )

    def url(self, repository: str) -> str:
        return f"http://127.0.0.1:{self.port}/{repository}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request, by git or by a failure."""
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        if self.status != 200:
            request.send_error(self.status)
            return
        if self._is_refused(request):
            return
        held = self.held
        if held is not None and b"command=fetch" in body:
            self.transferring.set()
            held.wait(60)
        head, _, content = self._backend(request, body).partition(b"\r\n\r\n")
        request.send_response(200)
        for line in head.decode().splitlines():
            name, _, value = line.partition(": ")
            request.send_header(name, value)
        if b"Content-Length" not in head:
            request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        try:
            request.wfile.write(content)
        except (BrokenPipeError, ConnectionResetError):
            return

    def _is_refused(self, request: BaseHTTPRequestHandler) -> bool:
        """Send the client elsewhere, or ask it to log in, if that is due."""
        sent = request.headers.get("Authorization")
        self.heard += [sent] if sent else []
        expected = base64.b64encode((self.login or "").encode()).decode()
        if self.moved_to is None and (self.login is None or sent == f"Basic {expected}"):
            return False
        text = self.message.replace("{sent}", sent or "").encode()
        request.send_response(401 if self.moved_to is None else 301)
        request.send_header("WWW-Authenticate", 'Basic realm="git"')
        request.send_header("Location", f"{self.moved_to}{request.path}")
        request.send_header("Content-Type", "text/plain")
        request.send_header("Content-Length", str(len(text)))
        request.end_headers()
        request.wfile.write(text)
        return True

    def _backend(self, request: BaseHTTPRequestHandler, body: bytes) -> bytes:
        parts = urlsplit(request.path)
        environment = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
            "GIT_PROTOCOL": request.headers.get("Git-Protocol") or "",
            "REQUEST_METHOD": request.command,
            "PATH_INFO": parts.path,
            "QUERY_STRING": parts.query,
            "CONTENT_TYPE": request.headers.get("Content-Type") or "",
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": request.headers.get("Content-Encoding") or "",
            "REMOTE_ADDR": "127.0.0.1",
        }
        done = subprocess.run(  # an error is in its output too
            ["git", "http-backend"], input=body, env=environment, capture_output=True, check=False
        )
        return done.stdout

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if self.held is not None:
            self.held.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def git_server(root: Path, *, port: int = 0) -> Iterator[GitServer]:
    """A server that is stopped at the end of the block."""
    server = GitServer(root, port)
    server.start()
    try:
        yield server
    finally:
        server.stop()
