"""Small servers that answer like the APIs of GitHub, Gitea and GitLab, and check what those check.

They know one repository, `team/repo`, and the commits that a test names. A request that the real forge
refuses is refused here with the same status: a wrong token, a missing user agent, a description of more
than 140 characters, an unknown commit, a second webhook with the same URL.
"""

import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qsl, unquote, urlsplit

import jwt

TOKEN = "forge-token-0123456789abcdef"
OWNER, NAME = "team", "repo"
COMMIT = "c0ffee" + "0" * 34
OTHER_COMMIT = "beef" + "1" * 36
APP_ID = "4711"
INSTALLATION = "99"


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Any


@dataclass(frozen=True)
class Reply:
    status: int
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    after_s: float = 0.0


class NotAccepted(Exception):
    """The forge refuses the request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.reply = Reply(status, {"message": message})


@dataclass
class FakeForge:
    """One forge with one repository. `planned` are replies to the next requests instead of its own."""

    forge: ClassVar[str]
    origin: str = ""
    commits: set[str] = field(default_factory=lambda: {COMMIT, OTHER_COMMIT})
    hooks: list[dict[str, Any]] = field(default_factory=list)
    statuses: list[dict[str, Any]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    planned: list[Reply] = field(default_factory=list)
    number: int = 0

    @property
    def url(self) -> str:
        return f"{self.origin}/{OWNER}/{NAME}.git"

    def answer(self, request: Request) -> Reply:
        self.requests.append(request)
        if self.planned:
            return self.planned.pop(0)
        try:
            return self.route(request)
        except NotAccepted as refused:
            return refused.reply

    def route(self, request: Request) -> Reply:
        raise NotImplementedError

    def count(self) -> int:
        """The next number of a hook or status."""
        self.number += 1
        return self.number

    def shown_hooks(self) -> list[tuple[str, str]]:
        """URL and secret of each active webhook for pushes."""
        return [
            (one["config"]["url"], one["config"]["secret"])
            for one in self.hooks
            if one["active"] and "push" in one["events"]
        ]

    def shown_statuses(self) -> list[tuple[str, str, str, str, str]]:
        """Commit, context, state, text and link of each status, oldest first."""
        return [
            (one["sha"], one["context"], one["state"], one["description"], one["target_url"])
            for one in self.statuses
        ]

    def known(self, sha: str) -> str:
        if sha not in self.commits:
            raise NotAccepted(422, f"No commit found for SHA: {sha}")
        return sha


class FakeGitHub(FakeForge):
    """GitHub Enterprise, because its API is on the same host as its repositories."""

    forge = "github"
    base = "/api/v3"
    public_key: str | None = None
    """The public key of the App, in PEM; None when no App is installed."""

    def __init__(self, origin: str = "") -> None:
        super().__init__(origin)
        self.app_tokens: dict[str, float] = {}
        self.lives_s = 3600.0

    def route(self, request: Request) -> Reply:
        if not request.path.startswith(f"{self.base}/"):
            raise NotAccepted(404, "Not Found")
        if not request.headers.get("user-agent"):
            raise NotAccepted(403, "Request forbidden by administrative rules")
        path = request.path.removeprefix(self.base)
        if path in (
            f"/repos/{OWNER}/{NAME}/installation",
            f"/app/installations/{INSTALLATION}/access_tokens",
        ):
            return self.app(request, path)
        self.authorize(request)
        repository = f"/repos/{OWNER}/{NAME}"
        if not path.startswith(repository):
            raise NotAccepted(404, "Not Found")
        return self.repository(request, path.removeprefix(repository))

    def app(self, request: Request, path: str) -> Reply:
        kind, _, signed = request.headers.get("authorization", "").partition(" ")
        if kind != "bearer" or self.public_key is None:
            raise NotAccepted(401, "A JSON web token could not be decoded")
        try:
            claims = jwt.decode(
                signed,
                self.public_key,
                algorithms=["RS256"],
                options={"require": ["iat", "exp", "iss"]},
            )
        except jwt.PyJWTError as error:
            raise NotAccepted(401, f"A JSON web token could not be decoded: {error}") from error
        if claims["iss"] != APP_ID or claims["exp"] > time.time() + 600:
            raise NotAccepted(401, "'Expiration time' claim ('exp') is too far in the future")
        if path.endswith("/installation"):
            return Reply(200, {"id": int(INSTALLATION), "app_id": int(APP_ID)})
        if request.method != "POST" or request.body != {"repositories": [NAME]}:
            raise NotAccepted(422, "the repositories are not those of this installation")
        token = f"ghs_installation_token_{self.count()}"
        until = time.time() + self.lives_s
        self.app_tokens[token] = until
        shown = datetime.fromtimestamp(until, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return Reply(201, {"token": token, "expires_at": shown})

    def authorize(self, request: Request) -> None:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        alive = self.app_tokens.get(token, 0.0) > time.time()
        if kind != "token" or not (token == TOKEN or alive):
            raise NotAccepted(401, "Bad credentials")

    def repository(self, request: Request, path: str) -> Reply:
        if path == "":
            return Reply(200, {"full_name": f"{OWNER}/{NAME}", "id": 1})
        if match := re.fullmatch(r"/hooks(?:/(\d+))?", path):
            return self.hook(request, match[1])
        if match := re.fullmatch(r"/statuses/(\w+)", path):
            return self.post_status(request, self.known(match[1]))
        if match := re.fullmatch(r"/commits/(\w+)/status", path):
            sha = self.known(match[1])
            newest: dict[str, Any] = {}
            for one in self.statuses:
                if one["sha"] == sha:
                    newest[one["context"]] = self.present(one)
            return Reply(200, {"sha": sha, "statuses": list(newest.values())})
        raise NotAccepted(404, "Not Found")

    def hook(self, request: Request, number: str | None) -> Reply:
        if number is None and request.method == "GET":
            page, size = int(request.query.get("page", "1")), 2
            shown = [self.present_hook(one) for one in self.hooks]
            return Reply(200, shown[(page - 1) * size : page * size])
        if number is None:
            self.check_hook(request.body)
            made = {"id": self.count(), **request.body}
            self.hooks.append(made)
            return Reply(201, self.present_hook(made))
        found = next((one for one in self.hooks if one["id"] == int(number)), None)
        if found is None:
            raise NotAccepted(404, "Not Found")
        if request.method == "DELETE":
            self.hooks.remove(found)
            return Reply(204)
        self.change_hook(found, request.body)
        return Reply(200, self.present_hook(found))

    def check_hook(self, body: Any) -> None:
        self.check_config(body)
        if body.get("name") != "web":
            raise NotAccepted(422, "Validation Failed: name must be web")
        if body["config"]["url"] in [one["config"]["url"] for one in self.hooks]:
            raise NotAccepted(422, "Hook already exists on this repository")

    def check_config(self, body: Any) -> None:
        config = body["config"]
        if config["content_type"] != "json" or not config["url"].startswith("http"):
            raise NotAccepted(422, "Validation Failed: config")

    def change_hook(self, hook: dict[str, Any], body: Any) -> None:
        self.check_config(body)
        hook.update(body)

    def present_hook(self, hook: dict[str, Any]) -> dict[str, Any]:
        return {**hook, "config": {**hook["config"], "secret": "********"}}

    def post_status(self, request: Request, sha: str) -> Reply:
        body = request.body
        if request.method != "POST" or body["state"] not in (
            "pending",
            "success",
            "failure",
            "error",
        ):
            raise NotAccepted(422, "Validation Failed: state")
        if len(body["description"]) > 140:
            raise NotAccepted(422, "description is too long (maximum is 140 characters)")
        made = {"target_url": "", **body, "sha": sha, "id": self.count()}
        self.statuses.append(made)
        return Reply(201, self.present(made))

    def present(self, status: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in status.items() if key != "sha"}


class FakeGitea(FakeGitHub):
    """Gitea names the state `status`, and changes no secret of a webhook that exists."""

    forge = "gitea"
    base = "/api/v1"

    def check_hook(self, body: Any) -> None:
        self.check_config(body)
        if body.get("type") != "gitea":
            raise NotAccepted(422, "Invalid hook type")

    def change_hook(self, hook: dict[str, Any], body: Any) -> None:
        secret = hook["config"]["secret"]
        hook.update(body)
        hook["config"] = {**body["config"], "secret": secret}

    def present(self, status: dict[str, Any]) -> dict[str, Any]:
        shown = super().present(status)
        return {**shown, "status": shown.pop("state")}


class FakeGitLab(FakeForge):
    forge = "gitlab"
    STATES: ClassVar = {"pending", "running", "success", "failed", "canceled"}

    def route(self, request: Request) -> Reply:
        if request.headers.get("private-token") != TOKEN:
            raise NotAccepted(401, "401 Unauthorized")
        project = f"/api/v4/projects/{OWNER}%2F{NAME}"
        if not request.path.startswith(project):
            raise NotAccepted(404, "404 Project Not Found")
        path = request.path.removeprefix(project)
        if path == "":
            return Reply(200, {"id": 1, "path_with_namespace": f"{OWNER}/{NAME}"})
        if match := re.fullmatch(r"/hooks(?:/(\d+))?", path):
            return self.hook(request, match[1])
        if match := re.fullmatch(r"/statuses/(\w+)", path):
            return self.post_status(request.body, self.known(match[1]))
        if match := re.fullmatch(r"/repository/commits/(\w+)/statuses", path):
            sha, name = self.known(match[1]), request.query["name"]
            found = [one for one in self.statuses if one["sha"] == sha and one["name"] == name]
            return Reply(200, [{**one, "status": one["state"]} for one in found[-1:]])
        raise NotAccepted(404, "404 Not Found")

    def hook(self, request: Request, number: str | None) -> Reply:
        if number is None and request.method == "GET":
            page, size = int(request.query["page"]), int(request.query["per_page"])
            shown = [{k: v for k, v in one.items() if k != "token"} for one in self.hooks]
            return Reply(200, shown[(page - 1) * size : page * size])
        if number is None:
            made = {"id": self.count(), **request.body}
            self.hooks.append(made)
            return Reply(201, {"id": made["id"]})
        found = next((one for one in self.hooks if one["id"] == int(number)), None)
        if found is None:
            raise NotAccepted(404, "404 Not Found")
        if request.method == "DELETE":
            self.hooks.remove(found)
            return Reply(204)
        found.update(request.body)
        return Reply(200, {"id": found["id"]})

    def post_status(self, body: Any, sha: str) -> Reply:
        if body["state"] not in self.STATES:
            raise NotAccepted(400, "state does not have a valid value")
        last = [one for one in self.statuses if (one["sha"], one["name"]) == (sha, body["name"])]
        if last and last[-1]["state"] == body["state"]:
            raise NotAccepted(400, f"Cannot transition status via :enqueue from :{body['state']}")
        self.statuses.append({"target_url": "", **body, "sha": sha, "id": self.count()})
        return Reply(201, {"id": self.number})

    def shown_hooks(self) -> list[tuple[str, str]]:
        return [
            (one["url"], one["token"])
            for one in self.hooks
            if one["push_events"] and one["tag_push_events"]
        ]

    def shown_statuses(self) -> list[tuple[str, str, str, str, str]]:
        return [
            (one["sha"], one["name"], one["state"], one["description"], one["target_url"])
            for one in self.statuses
        ]


class _Handler(BaseHTTPRequestHandler):
    forge: FakeForge
    protocol_version = "HTTP/1.1"
    timeout = 5

    def _take(self) -> None:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        request = Request(
            method=self.command,
            path=parts.path,
            query={unquote(key): value for key, value in parse_qsl(parts.query)},
            headers={key.lower(): value for key, value in self.headers.items()},
            body=json.loads(body) if body else None,
        )
        reply = self.forge.answer(request)
        time.sleep(reply.after_s)
        data = reply.raw
        if data is None:
            data = b"" if reply.body is None else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        for key, value in {"content-type": "application/json", **reply.headers}.items():
            self.send_header(key, value)
        if reply.status != 204:
            self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _take  # noqa: N815 - names of the library

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextmanager
def serving(forge: FakeForge) -> Iterator[FakeForge]:
    """Serve the forge on a port of this machine. Its `origin` is set."""
    handler = type("Handler", (_Handler,), {"forge": forge})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        forge.origin = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield forge
        finally:
            server.shutdown()
            thread.join()
