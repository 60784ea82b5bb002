"""`make digests` against a registry over a socket that does as the distribution specification says."""

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.supply_chain.images import FILES, Registry, images_of, pin

ROOT = Path(__file__).parents[3]
MANIFEST = b'{"schemaVersion": 2, "manifests": []}'
DIGEST = f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}"


class Handler(BaseHTTPRequestHandler):
    """Gives a manifest to whoever brings the token that its challenge leads to."""

    stated = DIGEST
    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        host = self.headers["host"]
        if self.path.startswith("/token"):
            self.answer(200, b'{"token": "t0ken"}')
        elif self.headers.get("authorization") != "Bearer t0ken":
            challenge = (
                f'Bearer realm="http://{host}/token",service="s",scope="repository:a/b:pull"'
            )
            self.answer(401, b"{}", {"www-authenticate": challenge})
        elif self.path == "/v2/a/b/manifests/v1":
            self.answer(200, MANIFEST, {"docker-content-digest": self.stated})
        else:
            self.answer(404, b"{}")

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def host() -> Iterator[str]:
    Handler.stated, Handler.asked = DIGEST, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False) as made:
        yield made


def test_an_image_gets_the_digest_of_its_manifest(host: str, client: httpx.Client) -> None:
    image = f"{host}/a/b:v1"
    compose = f"    image: headrace-control:0.1.0\n    image: {image}\n    image: {image}\n"
    registry = Registry(client, scheme="http")
    pinned = pin(compose, registry.digest)
    assert images_of(pinned) == (f"{image}@{DIGEST}",)
    assert "headrace-control:0.1.0\n" in pinned
    assert len(Handler.asked) == 3, "the second place costs no request"
    assert pin(pinned, registry.digest) == pinned
    assert pin(f"FROM {image} AS build\n", registry.digest) == f"FROM {image}@{DIGEST} AS build\n"


def test_a_digest_that_is_not_that_of_the_content_is_refused(
    host: str, client: httpx.Client
) -> None:
    Handler.stated = "sha256:" + "0" * 64
    with pytest.raises(ValueError, match="try again"):
        Registry(client, scheme="http").digest(f"{host}/a/b:v1")


def test_an_absent_tag_is_named(host: str, client: httpx.Client) -> None:
    with pytest.raises(ValueError, match=r"404 for .*:v2; check the tag"):
        Registry(client, scheme="http").digest(f"{host}/a/b:v2")


@pytest.mark.parametrize("file", FILES)
def test_every_foreign_image_of_ours_is_found(file: str) -> None:
    text = (ROOT / file).read_text()
    named = [line for line in text.splitlines() if line.strip().startswith(("image:", "FROM "))]
    foreign = {line.split()[1] for line in named if "headrace-" not in line}
    assert foreign == set(images_of(text))
    assert foreign
