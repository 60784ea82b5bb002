"""Each template with packages of others is made, checked and tried as its README says: in the sandbox,
with the packages that its own `pyproject.toml` names."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from producers.cli.main import main
from producers.cli.rollouts.templates import TEMPLATES

pytestmark = [pytest.mark.agents, pytest.mark.kills, pytest.mark.processes]

WITH_PACKAGES = [name for name, template in TEMPLATES.items() if template.packages]


class Calculating(BaseHTTPRequestHandler):
    """A model that calls the first tool with 2 and 2, and says what the tool answered."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        last = asked["messages"][-1]
        message: dict[str, object] = {"role": "assistant", "content": f"It is {last['content']}"}
        if last["role"] != "tool":
            name = asked["tools"][0]["function"]["name"]
            call = {"name": name, "arguments": '{"a": 2, "b": 2}'}
            calls = [{"id": "c1", "type": "function", "function": call}]
            message = {"role": "assistant", "content": "", "tool_calls": calls}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
        body = json.dumps({"id": "1", "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def provider() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Calculating)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("template", WITH_PACKAGES)
def test_a_template_runs_with_its_packages(
    template: str,
    provider: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "headrace.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["rollout", "init", "sums", "--template", template]) == 0
    assert main(["rollout", "validate", "sums", "--json"]) == 0, capsys.readouterr().out
    capsys.readouterr()
    model = ["--provider-model", "any", "--provider-url", provider]
    assert main(["rollout", "test", "sums", "--rows", "1", *model, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["error"] is None, row["traceback"]
    assert [turn["role"] for turn in row["turns"]][-3:] == ["assistant", "tool", "assistant"]
    assert row["reward"] == 1.0
