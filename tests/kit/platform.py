"""A whole platform for a test: real processes, a home of its own, a small workspace to run.

The supervisor is the real one (`headrace up`), so what a test kills is restarted as it would be for a
user. Everything lives in a temporary directory and on free ports.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import httpx

from infra.operations.local import embedded_postgres
from infra.operations.local.free_port import free_port
from infra.operations.local.supervisor import tail

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]

TINY = "scratch:qwen3-tiny"

MAIN = '''
from headrace import AgentWorkflow, Grader


class Say(AgentWorkflow):
    async def run(self, ctx):
        reply = await ctx.chat(ctx.prompt)
        return [*ctx.prompt, reply]


class Count(Grader):
    """Pays for the digits of the answer, so that rewards differ within a group."""

    async def grade(self, ctx):
        for name, sample in ctx.samples.items():
            digits = sum(character.isdigit() for character in sample.text)
            ctx.set_sample_reward(name, digits / 8)
'''

GRADER_ONLY = MAIN.replace("class Say(AgentWorkflow)", "class Say")


PATIENCE = 3.0
"""How many times slower a machine may be than the one on which a limit was chosen. Limits only end tests
that hang; benchmarks measure speed."""

HOMES: set[Path] = set()
"""The homes that tests started a platform on."""


def eventually(
    get: Callable[[], T | None], *, within_s: float, what: str, every_s: float = 0.05
) -> T:
    """Poll until `get` returns something that is not None. Raises AssertionError at the deadline,
    which is later than `within_s`, for the machine may be slow."""
    deadline = time.monotonic() + PATIENCE * within_s
    while (value := get()) is None:
        assert time.monotonic() < deadline, f"not within {PATIENCE * within_s:.0f} s: {what}"
        time.sleep(every_s)
    return value


def git(directory: Path, *arguments: str) -> str:
    """Run git as a user would; returns its output."""
    environment = {
        **os.environ,
        "GIT_AUTHOR_NAME": "t",
        "GIT_AUTHOR_EMAIL": "t@example.org",
        "GIT_COMMITTER_NAME": "t",
        "GIT_COMMITTER_EMAIL": "t@example.org",
    }
    done = subprocess.run(
        ["git", *arguments], cwd=directory, env=environment, check=True, capture_output=True
    )
    return done.stdout.decode().strip()


def make_workspace(directory: Path, files: Mapping[str, str] | None = None) -> Path:
    """A git repository with one rollout `say` (and `files` over it), committed on `main`."""
    tree = {
        "rollouts/say/main.py": MAIN,
        "rollouts/say/pyproject.toml": '[project]\nname = "say"\nversion = "0"\n',
        **(files or {}),
    }
    for name, text in tree.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if not (directory / ".git").exists():
        git(directory, "init", "-q", "-b", "main")
    git(directory, "add", "-A")
    git(directory, "commit", "-q", "-m", "a commit")
    return directory


def run_config(**changes: Mapping[str, object]) -> dict[str, dict[str, Any]]:
    """A short deterministic GRPO run of the tiny model on `numbers`; `changes` per section."""
    config: dict[str, dict[str, Any]] = {
        "experiment": {
            "rollout": "say",
            "entrypoint": "main.py",
            "model_path": TINY,
            "dataset": "numbers",
        },
        "training": {
            "lr": 1e-2,
            "n_samples_per_prompt": 4,
            "rollout_batch_size": 2,
            "max_prompt_length": 64,
            "max_response_length": 6,
            "agent_workflow_timeout_s": 30,
            "grader_timeout_s": 30,
        },
        "checkpoints": {"checkpoint_save_freq": 2},
        "advanced": {"algorithm": "grpo", "max_steps": 4, "seed": 7, "deterministic": True},
    }
    for section, values in changes.items():
        config.setdefault(section, {}).update(values)
    return config


ROWS = "".join(
    json.dumps({"user_prompt": f"Say {n}", "ground_truth": str(n)}) + "\n" for n in range(8)
)


@dataclass
class RunningServer:
    """A platform that runs, whoever started it. `api` speaks to it with its API key."""

    home: Path
    url: str
    api: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        api_key = (self.home / "token").read_text().strip()
        self.api = httpx.Client(
            base_url=f"{self.url}/api/v1",
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=30,
            transport=httpx.HTTPTransport(retries=3),
        )

    def get(self, path: str, **parameters: str | int) -> Any:
        """GET, and retry while the control process restarts."""
        return eventually(lambda: self._get(path, parameters), within_s=60, what=f"GET {path}")

    def _get(self, path: str, parameters: Mapping[str, str | int]) -> Any:
        try:
            answer = self.api.get(path, params=dict(parameters))
        except httpx.TransportError:
            return None
        if answer.status_code == 503:
            return None
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, body: object, *, key: str | None = None) -> httpx.Response:
        """POST with an idempotency key, and retry while the control process is away."""
        headers = {"Idempotency-Key": key or uuid4().hex}
        return eventually(lambda: self._post(path, body, headers), within_s=60, what=f"POST {path}")

    def _post(self, path: str, body: object, headers: dict[str, str]) -> httpx.Response | None:
        try:
            answer = self.api.post(path, json=body, headers=headers)
        except httpx.TransportError:
            return None
        return None if answer.status_code == 503 else answer

    def upload(self, name: str, content: str = ROWS, *, file_name: str = "rows.jsonl") -> None:
        """Register a dataset."""
        made = self.post("/datasets", {"name": name, "file_name": file_name})
        assert made.status_code == 201, made.text
        path = made.json()["upload"]["path"].removeprefix("/api/v1")
        put = eventually(lambda: self._put(path, content), within_s=60, what=f"PUT {path}")
        assert put.status_code == 200, put.text

    def _put(self, path: str, content: str) -> httpx.Response | None:
        try:
            answer = self.api.put(path, content=content.encode())
        except httpx.TransportError:
            return None
        return None if answer.status_code == 503 else answer

    def submit(self, config: Mapping[str, object], **more: Any) -> str:
        """Submit a run and return its id."""
        answer = self.post("/runs", {"config": config, **more})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["run"]["id"])

    def info(self, run: str) -> Any:
        return self.get(f"/runs/{run}")

    def wait(self, run: str, *statuses: str, within_s: float = 120, every_s: float = 0.1) -> Any:
        """Wait until the run has one of these statuses (default: any final one), and return its info.
        Each request costs the platform CPU time, so measurements ask rarely (`every_s`). Raises
        AssertionError with the run's error as soon as it has ended in another status."""
        wanted = statuses or FINAL

        def look() -> Any:
            info = self.info(run)
            status = info["run"]["status"]
            assert status in wanted or status not in FINAL, f"{status}: {info['run']['error']}"
            return info if status in wanted else None

        what = f"run {run} {'/'.join(wanted)}"
        return eventually(look, within_s=within_s, what=what, every_s=every_s)

    def events(self, run: str) -> list[Any]:
        """All events of a run, in log order."""
        found: list[Any] = []
        after = ""
        while True:
            page = self.get(f"/runs/{run}/events", limit=500, **({"after": after} if after else {}))
            found += page["events"]
            if not page["events"]:
                return found
            after = page["next"]


@dataclass
class Platform(RunningServer):
    """A platform that a test started."""

    process: subprocess.Popen[bytes]
    environment: dict[str, str]


FINAL = ("finished", "failed", "stopped", "killed", "crashed")
"""Statuses that a run keeps."""


@contextmanager
def platform(home: Path, *, environment: Mapping[str, str] | None = None) -> Iterator[Platform]:
    """`headrace up` on `home` until the block ends, then stopped in order."""
    env = platform_environment(home, environment or {})
    url = env["HEADRACE_URL"]
    started = Platform(home=home, url=url, process=serving(env), environment=env)
    try:
        with started.api:
            yield started
    finally:
        started.process.send_signal(signal.SIGTERM)
        try:
            started.process.wait(PATIENCE * 30)
        except subprocess.TimeoutExpired:
            started.process.kill()
            started.process.wait(60)


def platform_environment(home: Path, settings: Mapping[str, str]) -> dict[str, str]:
    """The environment of a platform on `home`, and of commands that are to meet it; on a free port."""
    HOMES.add(home)
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")},
        "HEADRACE_HOME": str(home),
        "HEADRACE_URL": f"http://127.0.0.1:{free_port()}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        **settings,
    }


def serving(environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """`headrace up` with these settings, once it is ready. What it says goes beside its home."""
    home = Path(environment["HEADRACE_HOME"])
    said = home.with_name(f"{home.name}.up.log")
    with said.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "producers.cli.main", "up"],
            env=environment,
            stdout=output,
            stderr=output,
        )

    def ready() -> bool | None:
        assert process.poll() is None, f"headrace up ended with {process.returncode}: {tail(said)}"
        return is_ready(asker)

    try:
        with httpx.Client(base_url=environment["HEADRACE_URL"], timeout=2) as asker:
            eventually(ready, within_s=60, what=f"headrace up on {home} is ready")
    except BaseException:
        process.kill()
        raise
    return process


def is_ready(asker: httpx.Client) -> bool | None:
    """Whether the control process answers. The client is kept, because to make one reads all
    certificates of the machine."""
    try:
        answer = asker.get("/readyz")
    except httpx.TransportError:
        return None
    return True if answer.status_code == 200 else None


def forget_homes() -> None:
    """Remove the embedded databases of the homes so far. As root they are not below the directories of
    the tests, and those of a whole test run would fill a small disk."""
    while HOMES:
        embedded_postgres.remove(HOMES.pop())


def verify(started: Platform, run: str, *, within_s: float = 60) -> Any:
    """Ask for a verification of a run, and return it once it has ended."""
    asked = started.post(f"/runs/{run}/verify", {})
    assert asked.status_code == 202, asked.text
    identity = asked.json()["verification"]["id"]

    def ended() -> Any:
        found = started.get(f"/verifications/{identity}")["verification"]
        return None if found["status"] == "running" else found

    return eventually(ended, within_s=within_s, what="the verification ends")


def final_adapter(info: Any) -> str:
    """The hash of the last checkpoint's weights."""
    last = max(info["checkpoints"], key=lambda checkpoint: checkpoint["step"])
    return str(last["adapter_sha256"])
