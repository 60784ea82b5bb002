"""A model hub on this machine that keeps the protocol of the Hugging Face hub: repositories, preupload,
LFS batches with single and multipart uploads, and commits.

It checks what a hub checks: the token, that uploaded bytes have the hash and size of their oid, that a
commit names only objects that it has, and that its parent is the head. `faults` are answers that it
gives instead, once each.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_a-token-of-the-tests"
LFS = (".safetensors", ".bin")
CHUNK = 64 << 10
"""Larger objects are uploaded in parts of this size."""


@dataclass
class HubRepository:
    """A repository: its files, its commits (the newest first), and whether it is private."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[dict[str, Any]] = field(default_factory=list)

    @property
    def head(self) -> str:
        return str(self.commits[0]["id"])


@dataclass
class HubFault:
    """An answer instead of the hub's own, to the first `times` requests that match."""

    method: str
    path: str
    status: int
    text: str = "no"
    headers: Mapping[str, str] = field(default_factory=dict)
    times: int = 1
    after: bool = False
    """Whether the hub does what is asked before it gives this answer."""


@dataclass
class Hub:
    """The state of the hub. `before` is called with the method and path of each request."""

    url: str = ""
    repositories: dict[str, HubRepository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    parts: dict[tuple[str, int], bytes] = field(default_factory=dict)
    faults: list[HubFault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    namespaces: tuple[str, ...] = ("org",)
    before: Callable[[str, str], None] = lambda method, path: None
    lock: threading.RLock = field(default_factory=threading.RLock)

    def commits_of(self, name: str) -> list[dict[str, Any]]:
        """The commits of a repository but the one that made it, the newest first."""
        return self.repositories[name].commits[:-1]

    def uploads(self, oid: str) -> int:
        """How often bytes of an object were uploaded."""
        return sum(method == "PUT" and oid in path for method, path in self.requests)

    def commit(self, name: str, message: str, description: str) -> str:
        """Add a commit, and return its id."""
        repository = self.repositories[name]
        identity = hashlib.sha256(f"{name}/{len(repository.commits)}".encode()).hexdigest()[:40]
        entry = {"id": identity, "title": message, "message": description, "authors": []}
        repository.commits.insert(0, {**entry, "date": "2026-01-02T03:04:05.000Z"})
        return identity


class RefusedByHub(Exception):
    """The hub answers with an error."""

    def __init__(self, status: int, text: str, code: str = "", *, about: str = "") -> None:
        super().__init__(text)
        self.status, self.text, self.code, self.about = status, text, code, about


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def log_message(self, *_: object) -> None:
        return

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self._body()
        with self.hub.lock:
            self.hub.requests.append((self.command, path))
        self.hub.before(self.command, path)
        fault = self._fault(path)
        if fault is not None and not fault.after:
            self._answer(fault.status, {"error": fault.text}, fault.headers)
            return
        try:
            with self.hub.lock:
                status, answer, headers = self._route(path, body)
        except RefusedByHub as error:
            code = {"X-Error-Code": error.code} if error.code else {}
            extra = {**code, "X-Error-Message": error.text}
            about = {"url": f"{self.hub.url}/{error.about}"} if error.about else {}
            self._answer(error.status, {"error": error.text, **about}, extra)
            return
        if fault is not None:
            self._answer(fault.status, {"error": fault.text}, fault.headers)
            return
        self._answer(status, answer, headers)

    def _fault(self, path: str) -> HubFault | None:
        with self.hub.lock:
            for fault in self.hub.faults:
                if fault.times and fault.method == self.command and re.search(fault.path, path):
                    fault.times -= 1
                    return fault
        return None

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, status: int, value: object, headers: Mapping[str, str]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, text in headers.items():
            self.send_header(name, text)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client was killed
            self.end_headers()
            self.wfile.write(data)

    def _route(self, path: str, body: bytes) -> tuple[int, object, Mapping[str, str]]:
        if match := re.fullmatch(r"/storage/([0-9a-f]{64})(?:/(\d+))?", path):
            return self._store(match[1], match[2], body)
        if match := re.fullmatch(r"/complete/([0-9a-f]{64})", path):
            return 200, self._complete(match[1], json.loads(body)), {}
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise RefusedByHub(401, "Invalid credentials in Authorization header")
        if path == "/api/validate-yaml":
            text = json.loads(body)["content"]
            if not text.startswith("---\n"):
                self.hub.problems.append("the card has no header")
            return 200, {"errors": [], "warnings": []}, {}
        if path == "/api/repos/create":
            return 200, self._create(json.loads(body)), {}
        if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return 200, self._batch(self._repository(match[1]), json.loads(body)), {}
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/([a-z]+)/([^/]+))?", path)
        if match is None:
            raise RefusedByHub(404, f"no route {path}")
        return 200, self._model(match[1], match[2], body), {}

    def _repository(self, name: str) -> HubRepository:
        if name not in self.hub.repositories:
            raise RefusedByHub(404, "Repository not found", "RepoNotFound")
        return self.hub.repositories[name]

    def _create(self, asked: Mapping[str, Any]) -> object:
        name = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] not in self.hub.namespaces:
            raise RefusedByHub(403, f"You have no rights to create a model under {name}")
        if name in self.hub.repositories:
            raise RefusedByHub(409, "You already created this model repo", about=name)
        private = asked.get("visibility") == "private" or asked.get("private") is True
        self.hub.repositories[name] = HubRepository(private, {".gitattributes": b"*.bin lfs\n"})
        self.hub.commit(name, "initial commit", "")
        return {"url": f"{self.hub.url}/{name}", "name": name, "id": "1"}

    def _model(self, name: str, verb: str | None, body: bytes) -> object:
        repository = self._repository(name)
        if verb is None or verb == "revision":
            files = [{"rfilename": file} for file in repository.files]
            facts = {"_id": "1", "id": name, "modelId": name, "private": repository.private}
            return {**facts, "sha": repository.head, "siblings": files, "tags": []}
        if verb == "commits":
            return repository.commits
        if verb == "preupload":
            asked = json.loads(body)["files"]
            return {"files": [self._mode(one["path"]) for one in asked]}
        if verb == "commit":
            return self._commit(name, repository, body)
        raise RefusedByHub(404, f"no route for {verb}")

    def _mode(self, path: str) -> object:
        mode = "lfs" if path.endswith(LFS) else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False}

    def _batch(self, repository: HubRepository, asked: Mapping[str, Any]) -> object:
        if asked["operation"] != "upload" or asked["hash_algo"] != "sha256":
            raise RefusedByHub(422, "unknown operation or hash")
        return {"transfer": "basic", "objects": [self._action(one) for one in asked["objects"]]}

    def _action(self, asked: Mapping[str, Any]) -> object:
        oid, size = asked["oid"], asked["size"]
        if oid in self.hub.objects:
            return {"oid": oid, "size": size}
        href, header = f"{self.hub.url}/storage/{oid}", {}
        if size > CHUNK:
            href = f"{self.hub.url}/complete/{oid}"
            numbers = range(1, -(-size // CHUNK) + 1)
            parts = {str(n).zfill(5): f"{self.hub.url}/storage/{oid}/{n}" for n in numbers}
            header = {"chunk_size": str(CHUNK), **parts}
        return {"oid": oid, "size": size, "actions": {"upload": {"href": href, "header": header}}}

    def _store(
        self, oid: str, part: str | None, body: bytes
    ) -> tuple[int, object, Mapping[str, str]]:
        if "Authorization" in self.headers:
            self.hub.problems.append("the token was sent to the storage")
        if part is None:
            self._keep(oid, body)
        else:
            self.hub.parts[(oid, int(part))] = body
        return 200, {}, {"ETag": hashlib.sha256(body).hexdigest()[:32]}

    def _complete(self, oid: str, asked: Mapping[str, Any]) -> object:
        data = b""
        for part in asked["parts"]:
            held = self.hub.parts.get((oid, part["partNumber"]))
            if held is None or hashlib.sha256(held).hexdigest()[:32] != part["etag"]:
                raise RefusedByHub(400, "a part is missing or has another etag")
            data += held
        self._keep(oid, data)
        return {}

    def _keep(self, oid: str, data: bytes) -> None:
        if hashlib.sha256(data).hexdigest() != oid:
            self.hub.problems.append(f"bytes of {oid} have another hash")
            raise RefusedByHub(400, "the bytes do not have this hash")
        self.hub.objects[oid] = data

    def _commit(self, name: str, repository: HubRepository, body: bytes) -> object:
        lines = [json.loads(line) for line in body.splitlines() if line]
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit") not in (None, repository.head):
            raise RefusedByHub(412, "A commit has happened since. Please refresh and try again.")
        files = dict(repository.files)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if len(self.hub.objects.get(value["oid"], b"")) != value["size"]:
                    raise RefusedByHub(400, f"{value['path']} was not uploaded")
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        repository.files = files
        identity = self.hub.commit(name, header["summary"], header["description"])
        url = f"{self.hub.url}/{name}/commit/{identity}"
        return {"commitUrl": url, "commitOid": identity, "success": True}


@contextmanager
def model_hub() -> Iterator[Hub]:
    """A hub that runs inside of the block, with the organisation `org`."""
    state = Hub()
    handler = type("HubHandler", (_Handler,), {"hub": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
