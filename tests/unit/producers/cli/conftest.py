"""A small HTTP server for tests, which answers from a table and records the requests."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from producers.cli.main import main

Answer = tuple[int, str, bytes]


@dataclass
class ReceivedRequest:
    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)


@dataclass
class FakeServer:
    """`answers[(method, path)]` is a list. Each request takes the first answer; the last one
    stays."""

    url: str = ""
    answers: dict[tuple[str, str], list[Answer | None]] = field(default_factory=dict)
    requests: list[ReceivedRequest] = field(default_factory=list)

    def answer(self, method: str, path: str, document: object, status: int = 200) -> None:
        body = json.dumps(document).encode()
        self.raw(method, path, body, status=status, kind="application/json")

    def raw(
        self, method: str, path: str, body: bytes, *, status: int = 200, kind: str = "text/plain"
    ) -> None:
        self.answers.setdefault((method, "/api/v1" + path), []).append((status, kind, body))

    def drop(self, method: str, path: str) -> None:
        """Close the connection once without a response."""
        self.answers.setdefault((method, "/api/v1" + path), []).append(None)

    def take(self, method: str, path: str) -> Answer | None:
        listed = self.answers.get((method, path))
        if not listed:
            problem = {"title": "Not found", "detail": f"there is no {path}", "code": "NOT_FOUND"}
            return 404, "application/problem+json", json.dumps(problem).encode()
        return listed.pop(0) if len(listed) > 1 else listed[0]


def handler(fake: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            path, _, query = self.path.partition("?")
            size = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(size)
            fake.requests.append(
                ReceivedRequest(self.command, path, query, dict(self.headers), body)
            )
            answer = fake.take(self.command, path)
            if answer is None:
                self.close_connection = True
                return
            status, kind, content = answer
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_DELETE = handle_any  # noqa: N815 - the names that http.server calls

        def log_message(self, *_: object) -> None: ...

    return Handler


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeServer]:
    fake = FakeServer()
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler(fake))
    fake.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    monkeypatch.setenv("HEADRACE_URL", fake.url)
    monkeypatch.setenv("HEADRACE_API_KEY", "the-api-key")
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    yield fake
    http.shutdown()
    http.server_close()
    thread.join()


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        document = json.loads(self.err)
        assert document["schema_version"] == 1
        return document["error"]


class Run:
    """Runs `headrace ARGUMENTS` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Ran:
        self._capsys.readouterr()
        code = main(list(arguments))
        captured = self._capsys.readouterr()
        return Ran(code, captured.out, captured.err)


@pytest.fixture
def headrace(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)
