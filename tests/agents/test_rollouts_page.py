"""The first section of docs/rollouts.md, followed as it stands: its files are written, and its commands
run in a shell. Only three things differ. The judge is a local server, answers are short, and the data
has two steps."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.kit.platform import ROOT, platform_environment

pytestmark = [pytest.mark.agents, pytest.mark.kills, pytest.mark.processes]

PAGE = ROOT / "docs" / "rollouts.md"
SECTION = re.compile(r"^## From an empty folder to a training run$(.*?)^## ", re.M | re.S)
BLOCK = re.compile(r"^```(sh|toml|python)\n(.*?)^```$", re.M | re.S)
NUM_ROWS = 16
WITHIN_S = 300


class Judge(BaseHTTPRequestHandler):
    """A judge that gives everything half of the points."""

    def do_POST(self) -> None:
        assert self.headers["authorization"] == "Bearer sk-for-the-judge"
        self.rfile.read(int(self.headers["content-length"]))
        content = json.dumps({"explanation": "short enough", "score": 0.5})
        message = {"role": "assistant", "content": content}
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
def judge() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def environment(judge: str, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables of the shell. The server that the page starts is stopped at the end."""
    bin_directory = Path(sys.executable).parent
    found = platform_environment(
        tmp_path / "home",
        {
            "PATH": f"{bin_directory}:{os.environ['PATH']}",
            "JUDGE_KEY": "sk-for-the-judge",
            "HEADRACE_NETWORK_ALLOW": f"*={judge}",
            "GIT_AUTHOR_NAME": "t",
            "GIT_AUTHOR_EMAIL": "t@example.org",
            "GIT_COMMITTER_NAME": "t",
            "GIT_COMMITTER_EMAIL": "t@example.org",
        },
    )
    yield found
    subprocess.run(["headrace", "down"], env=found, check=False, capture_output=True, timeout=120)


def test_the_page_leads_to_a_training_run(
    tmp_path: Path, judge: str, environment: dict[str, str]
) -> None:
    found = SECTION.search(PAGE.read_text())
    assert found is not None
    place, printed = tmp_path, ""
    for kind, text in BLOCK.findall(found[1]):
        if kind == "sh":
            # The judge of the test is not the provider, so it gets a key of its own.
            printed += run(text.replace("OPENAI_API_KEY", "JUDGE_KEY"), place, environment)
            if place == tmp_path:
                place = tmp_path / "sums"
                shorten(place)
        else:
            write(text, place, judge)
    assert "first: finished" in printed
    shown = json.loads(run("headrace train samples first --step 1 --json", place, environment))
    parts = [sample["parts"] for sample in shown["samples"]]
    assert all(part["brief"] == 0.5 for part in parts)


def run(commands: str, place: Path, environment: Mapping[str, str]) -> str:
    """The output of commands. Fails with it when one of them fails."""
    done = subprocess.run(
        ["/bin/sh", "-e"],
        input=commands,
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def write(text: str, place: Path, judge: str) -> None:
    """Write the file that the first line of a block names, or append to it if it is a config."""
    name, _, content = text.removeprefix("# ").partition("\n")
    path = place / name
    if name.startswith("configs/"):
        local = f'base_url = "http://{judge}/v1"\napi_key_secret = "JUDGE_KEY"\n'
        path.write_text(f"{path.read_text()}\n{content}{local}")
    else:
        path.write_text(content)


def shorten(workspace: Path) -> None:
    config = workspace / "configs" / "training" / "sums.toml"
    config.write_text(
        re.sub(r"max_answer_length = \d+", "max_answer_length = 24", config.read_text())
    )
    rows = workspace / "data" / "sums.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:NUM_ROWS]))
