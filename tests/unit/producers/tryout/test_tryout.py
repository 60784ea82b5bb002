"""`headrace rollout test` and `validate`: a rollout is tried in a process of its own, here with a
provider's model that a fake server answers."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from producers.cli.display.output import Document
from producers.cli.errors import Failure
from producers.cli.main import main
from producers.cli.rollouts.templates import make_rollout
from producers.cli.rollouts.tryout_process import run_tryout
from producers.cli.rollouts.workspace_files import find_rollout
from producers.cli.scaffold import scaffold

pytestmark = pytest.mark.processes

KEY = "sk-0123456789abcdef"
MAIN = """
from headrace import AgentWorkflow, Grader

class Solve(AgentWorkflow):
    async def run(self, ctx):
        print("asked", ctx.prompt[-1]["content"], chr(27) + "[31m")
        reply = await ctx.chat(ctx.prompt)
        (ctx.artifacts_dir / "note.txt").write_text("four")
        if "* 3" in ctx.prompt[-1]["content"]:
            raise ValueError("three is too much")
        return [*ctx.prompt, reply]

class Check(Grader):
    async def grade(self, ctx):
        print("grading")
        for name, sample in ctx.samples.items():
            ctx.set_sample_reward(name, float(sample.text == ctx.label))
"""


class Answering(BaseHTTPRequestHandler):
    """Answers every chat completion with 4, and judges with 0.5."""

    keys: list[str] = []
    judged_with: list[str] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        is_judged = b"You are a strict and fair judge" in body
        (self.judged_with if is_judged else self.keys).append(str(self.headers["authorization"]))
        text = '{"explanation": "it is short", "score": 0.5}' if is_judged else "4"
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
        answer = {"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def provider() -> Iterator[str]:
    """The base URL of a server that answers 4."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_rollout(tmp_path, "mine", "single")
    (tmp_path / "rollouts/mine/main.py").write_text(MAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_KEY", KEY)
    return tmp_path


def test_a_rollout_is_tried_with_a_providers_model(
    workspace: Path, provider: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--provider-model",
        "any",
        "--provider-url",
        provider,
        "--provider-key-env",
        "MY_KEY",
    ]
    assert main(["rollout", "test", "mine", "--rows", "2", *options, "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    good, bad = rows
    assert (good["reward"], good["error"], good["traceback"]) == (1.0, None, None)
    assert good["turns"] == [{"role": "assistant", "content": "4"}]
    assert good["stdout"] == "asked What is 2 * 2? \x1b[31m\n"
    assert good["files"] == bad["files"] == {"note.txt": 4}
    assert good["grader"]["stdout"] == "grading\n"
    assert bad["reward"] is None
    assert "three is too much" in bad["error"]
    assert 'rollouts/mine/main.py", line 10, in run' in bad["traceback"]
    assert "headrace/" not in bad["traceback"]
    assert set(Answering.keys) == {f"Bearer {KEY}"}
    assert main(["rollout", "test", "mine", *options]) == 0
    printed = capsys.readouterr().out
    assert "asked What is 2 * 2? [31m" in printed
    assert "\x1b" not in printed
    assert "mean reward 1" in printed
    assert printed.startswith("installing packages and importing the code in a sandbox\n")
    assert main(["rollout", "test", "mine", "--rows", "2", *options]) == 1
    summary = "2 tried, 1 failed, mean reward 0.5 (1 that the policy made fail count as 0)"
    assert summary in capsys.readouterr().out
    assert main(["rollout", "test", "mine", "--first", "64", *options]) == 1
    assert "behind the last row of mine.jsonl, which is 63" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "has_all"), [("scratch:qwen3-tiny", True), ("scratch:qwen3-2m", False)]
)
def test_characters_that_the_model_does_not_have_are_named_before_it_is_loaded(
    workspace: Path, shape: str, has_all: bool
) -> None:
    rows = [f'{{"user_prompt": "{n}*2?", "ground_truth": "{n * 2}"}}' for n in range(4)]
    (workspace / "data/mine.jsonl").write_text("\n".join(rows))
    answers = run_tryout({**find_rollout("mine", None).request(), "model": shape})
    first = str(next(answers)["note"])
    assert (first == f"loading {shape}") is has_all
    assert ("no symbol for 1 characters of mine.jsonl" in first) is not has_all


def test_rubrics_are_judged_with_keys_of_the_environment(
    workspace: Path,
    provider: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = workspace / "configs/training/mine.toml"
    rubric = [
        "[[advanced.rubrics]]",
        'name = "short"',
        'text = "Is it short?"',
        'model = "small"',
        f'base_url = "{provider}"',
        'api_key_secret = "JUDGE_KEY"',
    ]
    config.write_text("\n".join([config.read_text(), *rubric, ""]))
    options = [
        "--provider-model",
        "any",
        "--provider-url",
        provider,
        "--provider-key-env",
        "MY_KEY",
    ]
    assert main(["rollout", "test", "mine", "--rows", "1", *options]) == 1
    assert "the environment variables JUDGE_KEY are not set" in capsys.readouterr().err
    monkeypatch.setenv("JUDGE_KEY", KEY[::-1])
    assert main(["rollout", "test", "mine", "--rows", "1", *options]) == 0
    assert "short: 0.5 by small (it is short)" in capsys.readouterr().out
    assert Answering.judged_with == [f"Bearer {KEY[::-1]}"]


def test_a_key_that_is_not_set_is_named(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY")
    provider = {"name": "any", "url": "http://127.0.0.1:1/v1", "key_env": "MY_KEY"}
    with pytest.raises(Failure, match="MY_KEY is not set"):
        list(run_tryout({**find_rollout("mine").request(), "provider": provider}))


def checks(capsys: pytest.CaptureFixture[str]) -> dict[str, Document]:
    found = json.loads(capsys.readouterr().out)
    return {check["what"]: check for check in found["checks"]}


def test_the_workspace_that_init_makes_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has configs of training and of evaluations, and data for both."""
    scaffold(tmp_path / "sums", seed=0)
    monkeypatch.chdir(tmp_path / "sums")
    assert main(["rollout", "validate", "arithmetic", "--json"]) == 0
    found = checks(capsys)
    assert found["config"]["message"].endswith("configs/training/grpo.toml")
    assert found["dataset"]["message"].startswith("arithmetic-rl.jsonl")


def test_validate_says_everything_at_once(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollout", "validate", "mine", "--json"]) == 0
    good = checks(capsys)
    assert {name: check["status"] for name, check in good.items()} == {
        "config": "ok",
        "code": "ok",
        "packages": "ok",
        "dataset": "ok",
    }
    (workspace / "headrace.toml").write_text('[[mcp]]\nname = "sums"\ncommand = "mcp/sums.sh"\n')
    assert main(["rollout", "validate", "mine", "--json"]) == 1
    assert checks(capsys)["mcp"]["message"] == "sums: there is no file mcp/sums.sh"
    (workspace / "mcp").mkdir()
    (workspace / "mcp" / "sums.sh").touch()
    assert main(["rollout", "validate", "mine"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("installing packages and importing the code in a sandbox ...\n")
    assert "not used: sums" in said
    (workspace / "rollouts/mine/main.py").write_text("import nothing_like_it\n")
    (workspace / "data/mine.jsonl").write_text('{"user_prompt": 1}\n')
    config = workspace / "configs/training/mine.toml"
    config.write_text(config.read_text().replace("lr = 1e-5", 'lr = "high"'))
    assert main(["rollout", "validate", "mine", "--json"]) == 1
    bad = checks(capsys)
    assert "training.lr" in bad["config"]["message"]
    assert "nothing_like_it" in bad["code"]["message"]


def test_rows_that_a_submit_generates_are_no_problem(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = workspace / "configs/training/mine.toml"
    ref = "reasoning-gym:chain_sum?size=8"
    config.write_text(config.read_text().replace('dataset = "mine"', f'dataset = "{ref}"'))
    assert main(["rollout", "validate", "mine", "--json"]) == 0
    found = checks(capsys)["dataset"]
    assert found["status"] == "note"
    assert found["message"].startswith("a submit generates the rows; to try the rollout before: ")
    assert f"headrace dataset generate '{ref}' --out data/reasoning-gym." in found["message"]


EVAL = """
[experiment]
rollout = "mine"
entrypoint = "main.py"
model_path = "provider:any"
dataset = "mine"

[evaluation]
limit = 3
n = 2
batch_size = 2

[advanced]
base_url = "{url}"
api_key_secret = "MY_KEY"
usd_per_million = [0.0, 1000.0]
"""


def test_an_evaluation_runs_here_with_a_report(
    workspace: Path, provider: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = workspace / "configs/eval/mine.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(EVAL.format(url=provider))
    assert main(["eval", "run", str(config), "--limit", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    report, directory = document["report"], workspace / "mine-report"
    assert Path(document["directory"]).resolve() == directory
    assert report == json.loads((directory / "report.json").read_text())
    metrics = report["metrics"]
    assert (metrics["eval/count"], metrics["eval/failed"]) == (4, 2)
    assert (metrics["eval/pass@1"], metrics["eval/pass@2"], metrics["eval/tokens"]) == (0.5, 0.5, 4)
    assert (metrics["eval/reward"], metrics["eval/left_out"], metrics["eval/rows"]) == (0.5, 0, 2)
    assert 0 < metrics["eval/pass@1/low"] < 0.5 < metrics["eval/pass@1/high"] < 1
    assert metrics["eval/usd"] == pytest.approx(0.004)
    assert [(row["row"], row["rewards"], row["failed"]) for row in report["rows"]] == [
        (0, [1.0, 1.0], 0),
        (1, [None, None], 2),
    ]
    assert "three is too much" in report["rows"][1]["error"]
    samples = (directory / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in samples] == [0, 0, 1, 1]
    page = (directory / "report.md").read_text()
    assert "| eval/pass@2 | 0.5 |" in page
    assert main(["eval", "run", str(config), "--json"]) == 1
    assert "has a report already" in capsys.readouterr().err
