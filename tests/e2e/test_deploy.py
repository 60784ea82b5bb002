"""Checkpoints behind an OpenAI-compatible endpoint: the unmodified client chats with them while versions
are swapped, and after the process that serves was killed."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from infra.operations.local.free_port import free_port
from infra.operations.local.home import read_state
from tests.kit.platform import (
    TINY,
    Platform,
    eventually,
    make_workspace,
    platform,
    run_config,
)

pytestmark = [pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

REQUESTS = 240
ASKED: Any = [{"role": "user", "content": "Say 3"}]
SUMS = f"{TINY}:sums"


@pytest.fixture(scope="module")
def trained_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a platform that was stopped after a run, one of whose checkpoints is deployed."""
    root = tmp_path_factory.mktemp("deploy")
    workspace = make_workspace(root / "workspace")
    with platform(root / "home") as started:
        made = started.post("/workspaces", {"url": str(workspace), "name": "w"})
        assert made.status_code == 201, made.text
        started.upload("numbers")
        run = started.submit(run_config(), workspace="w", name="first")
        started.wait(run, "finished")
        assert deploy(started, "first@2", "sums")["model"] == SUMS
    return root / "home"


@pytest.mark.slow
@pytest.mark.kills
def test_a_deployment_waits_for_vllm(trained_home: Path) -> None:
    """It comes first: the platform of the tests below is on the same home."""
    away = {"HEADRACE_SAMPLER": f"vllm=http://127.0.0.1:{free_port()}"}
    with (
        platform(trained_home, environment=away) as started,
        client_of(started, max_retries=0) as client,
    ):
        with pytest.raises(openai.InternalServerError) as refused:
            _ask_once(client, SUMS)
        assert refused.value.status_code == 503
        assert refused.value.response.headers["retry-after"]

        def says_why() -> bool | None:
            try:
                _ask_once(client, SUMS)
            except openai.InternalServerError as error:
                return "no sampler answers" in str(error) or None
            return None

        eventually(says_why, within_s=60, what="the error names the servers")


@pytest.fixture(scope="module")
def running(trained_home: Path) -> Iterator[Platform]:
    with platform(trained_home) as started:
        yield started


def test_deployments_come_back_with_the_platform(running: Platform) -> None:
    with client_of(running) as client:

        def answered() -> bool | None:
            try:
                _ask_once(client, SUMS)
            except openai.InternalServerError:
                return None
            return True

        eventually(answered, within_s=60, what="the deployment answers after a restart")


def deploy(running: Platform, ref: str, name: str) -> dict[str, Any]:
    """Deploy a checkpoint, and wait until it is loaded."""
    asked = running.post("/deployments", {"checkpoint": ref, "name": name})
    assert asked.status_code == 202, asked.text

    def loaded() -> dict[str, Any] | None:
        found: dict[str, Any] = running.get(f"/deployments/{name}")["deployment"]
        return None if found["pending"] else found

    return eventually(loaded, within_s=60, what=f"{ref} is loaded")


def client_of(running: Platform, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key=api_key_of(running), **options)


def api_key_of(running: Platform) -> str:
    return (running.home / "token").read_text().strip()


@pytest.fixture
def client(running: Platform) -> Iterator[openai.OpenAI]:
    with client_of(running, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def deployed(running: Platform) -> str:
    """A deployment; its model name."""
    made = deploy(running, "first@2", "sums")
    assert made["status"] == "active", made
    assert made["checkpoint"] == "first@2"
    return str(made["model"])


def test_the_client_chats_with_a_deployed_checkpoint(client: openai.OpenAI, deployed: str) -> None:
    assert deployed == SUMS
    assert [model.id for model in client.models.list()] == [TINY, deployed]
    answer = client.chat.completions.create(
        model=deployed, messages=ASKED, max_tokens=6, temperature=0
    )
    assert answer.model == deployed
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 6
    again = client.chat.completions.create(
        model=deployed, messages=ASKED, max_tokens=6, temperature=0
    )
    assert again.choices[0].message.content == answer.choices[0].message.content
    base = client.chat.completions.create(model=TINY, messages=ASKED, max_tokens=6)
    assert base.model == TINY


def test_one_key_does_not_fill_the_memory(
    running: Platform, client: openai.OpenAI, deployed: str
) -> None:
    """`HEADRACE_TEST_LARGE_REQUESTS` is how many requests of 6.5 MB one key sends, 32 at a time."""
    num = int(os.environ.get("HEADRACE_TEST_LARGE_REQUESTS", "64"))
    size = int(os.environ.get("HEADRACE_TEST_LARGE_BYTES", "6500000"))
    body = json.dumps(
        {"model": deployed, "messages": [{"role": "user", "content": "a " * (size // 2)}]}
    ).encode()
    made = running.post("/api-keys", {"name": "large", "scopes": ["inference"]})
    assert made.status_code == 201, made.text
    headers = {"Authorization": f"Bearer {made.json()['secret']}"}
    state = read_state(running.home)
    assert state is not None
    pids = {one.name: one.pid for one in state.children if one.pid is not None}
    url, statuses = f"{running.url}/v1/chat/completions", list[int]()
    client.chat.completions.create(model=deployed, messages=ASKED, max_tokens=1)
    before = {name: resident_mib(pid) for name, pid in pids.items()}
    most, waits = dict(before), list[float]()

    def send() -> None:
        with httpx.Client(timeout=120) as http:
            for _ in range(num // 32):
                answer = http.post(url, content=body, headers=headers)
                if answer.status_code in (429, 503):
                    assert answer.headers["retry-after"] == "1"
                assert set(answer.json()) == {"error"}
                statuses.append(answer.status_code)

    senders = [threading.Thread(target=send) for _ in range(32)]
    for sender in senders:
        sender.start()
    while any(sender.is_alive() for sender in senders):
        began = time.monotonic()
        client.chat.completions.create(model=deployed, messages=ASKED, max_tokens=1)
        waits.append(time.monotonic() - began)
        most = {name: max(had, resident_mib(pids[name])) for name, had in most.items()}
    for sender in senders:
        sender.join()
    after = {name: resident_mib(pid) for name, pid in pids.items()}
    seen = f"{before=} {most=} {after=} {max(waits)=:.2f} {Counter(statuses)=}"
    assert len(statuses) == num // 32 * 32
    assert set(statuses) <= {400, 413, 429, 503}, seen
    assert {400, 413} & set(statuses), "what is admitted is refused for its length"
    for name in pids:
        assert most[name] < before[name] + 300, seen
        assert after[name] < before[name] + 128, f"most of it is given back: {seen}"


def resident_mib(pid: int) -> int:
    """The resident memory of a process in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def test_a_stream_has_the_text_of_the_whole_answer(client: openai.OpenAI, deployed: str) -> None:
    options: dict[str, Any] = {"model": deployed, "max_tokens": 24, "temperature": 1, "seed": 5}
    whole = client.chat.completions.create(messages=ASKED, **options)
    stream = client.chat.completions.create(
        messages=ASKED, stream=True, stream_options={"include_usage": True}, **options
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    other = client.chat.completions.create(messages=ASKED, **{**options, "seed": 6})
    assert other.choices[0].message.content != text


def test_a_text_is_continued(client: openai.OpenAI, deployed: str) -> None:
    one = client.completions.create(model=deployed, prompt="1+1=", max_tokens=5, temperature=0)
    assert one.object == "text_completion"
    two = client.completions.create(
        model=deployed, prompt=["1+1=", "2"], max_tokens=5, temperature=0, n=1
    )
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[0].text == one.choices[0].text
    stream = client.completions.create(
        model=deployed, prompt="1+1=", max_tokens=5, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == one.choices[0].text


def test_tools_are_part_of_the_prompt(client: openai.OpenAI, deployed: str) -> None:
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    options: dict[str, Any] = {"model": deployed, "messages": ASKED, "max_tokens": 2}
    without = client.chat.completions.create(**options).usage
    offered = client.chat.completions.create(tools=[tool], **options).usage
    assert without is not None
    assert offered is not None
    assert offered.prompt_tokens > without.prompt_tokens


def test_mistakes_have_the_form_of_openai(client: openai.OpenAI, deployed: str) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody:knows", messages=ASKED)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as invalid:
        client.chat.completions.create(model=deployed, messages=ASKED, temperature=9)
    assert invalid.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="top_k"):
        client.chat.completions.create(model=deployed, messages=ASKED, extra_body={"top_k": 5})
    stranger = client.with_options(api_key="hr_wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_a_version_is_swapped_under_load_without_a_failed_request(
    running: Platform, deployed: str
) -> None:
    failed: list[Exception] = []
    done = threading.Semaphore(0)

    def ask(client: openai.OpenAI, number: int) -> None:
        for each in range(REQUESTS // 8):
            try:
                answer = client.chat.completions.create(
                    model=deployed, messages=ASKED, max_tokens=24, stream=each % 2 == number % 2
                )
                if isinstance(answer, openai.Stream):
                    assert list(answer)[-1].choices[0].finish_reason
            except Exception as error:  # every failure counts
                failed.append(error)
            done.release()

    with client_of(running, max_retries=0) as client:
        threads = [threading.Thread(target=ask, args=(client, number)) for number in range(8)]
        for thread in threads:
            thread.start()
        for ref in ("first@4", "first@2", "first@4"):
            for _ in range(REQUESTS // 8):
                done.acquire()
            assert deploy(running, ref, "sums")["checkpoint"] == ref
        for thread in threads:
            thread.join()
    assert failed == []


def test_use_is_counted_for_each_api_key(running: Platform, deployed: str) -> None:
    made = running.post("/api-keys", {"name": "app", "scopes": ["inference"]}).json()
    with client_of(running).with_options(api_key=made["secret"]) as app:
        answer = app.chat.completions.create(model=deployed, messages=ASKED, max_tokens=4)
    assert answer.usage is not None

    def counted() -> dict[str, Any] | None:
        keys = running.get("/deployments/sums")["deployment"]["usage_by_api_key"]
        return next((used for used in keys if used["api_key_name"] == "app"), None)

    used = eventually(counted, within_s=30, what="the use is counted")
    assert used["requests"] == 1
    assert used["prompt_tokens"] == answer.usage.prompt_tokens
    assert used["completion_tokens"] == answer.usage.completion_tokens


def test_deployments_come_back_after_the_process_was_killed(
    running: Platform, deployed: str
) -> None:
    state = read_state(running.home)
    assert state is not None
    [serving] = [child for child in state.children if child.name == "serving"]
    assert serving.pid is not None
    os.kill(serving.pid, signal.SIGKILL)
    statuses = set()

    def answered() -> bool | None:
        answer = httpx.post(
            f"{running.url}/v1/chat/completions",
            json={"model": deployed, "messages": ASKED, "max_tokens": 2},
            headers={"Authorization": f"Bearer {api_key_of(running)}"},
            timeout=60,
        )
        statuses.add(answer.status_code)
        if answer.status_code == 503:
            assert answer.headers["retry-after"]
            assert json.loads(answer.content)["error"]["type"] == "server_error"
        return answer.status_code == 200 or None

    eventually(answered, within_s=60, what="the deployment answers again")
    assert statuses <= {200, 503}


def test_a_deployment_without_checkpoint_or_valid_name_is_refused(
    running: Platform, deployed: str
) -> None:
    missing = running.post("/deployments", {"checkpoint": "first@3", "name": "sums"})
    assert missing.status_code == 404
    bad = running.post("/deployments", {"checkpoint": "first@2", "name": "No Name"})
    assert bad.status_code == 400
    unknown = running.api.delete("/deployments/nobody")
    assert unknown.status_code == 404


def test_an_undeployed_model_is_gone(running: Platform, client: openai.OpenAI) -> None:
    deploy(running, "first@4", "gone")
    model = f"{TINY}:gone"
    client.chat.completions.create(model=model, messages=ASKED, max_tokens=1)
    assert running.api.delete("/deployments/gone").status_code == 202

    def absent() -> bool | None:
        return model not in [each.id for each in client.models.list()] or None

    eventually(absent, within_s=30, what="the model is not listed")
    with pytest.raises(openai.NotFoundError):
        eventually(lambda: _ask_once(client, model), within_s=10, what="it is not found")


def _ask_once(client: openai.OpenAI, model: str) -> None:
    client.chat.completions.create(model=model, messages=ASKED, max_tokens=1)


def test_a_run_with_a_deployment_is_not_deleted(running: Platform, deployed: str) -> None:
    refused = running.api.delete("/runs/first")
    assert refused.status_code == 409
    assert "undeploy" in refused.json()["detail"]


def test_a_checkpoint_of_another_base_is_refused(running: Platform, deployed: str) -> None:
    config = run_config(advanced={"max_steps": 1, "seed": 8})
    running.wait(running.submit(config, workspace="w", name="other"), "finished")
    refused = running.post("/deployments", {"checkpoint": "other@1", "name": "other"})
    assert refused.status_code == 409
    assert "another base model" in refused.json()["detail"]


def test_a_run_deploys_its_best_checkpoint_when_it_finishes(
    running: Platform, client: openai.OpenAI, deployed: str
) -> None:
    config = run_config(
        checkpoints={"checkpoint_save_freq": 2, "eval_interval": 2},
        advanced={
            "validation_dataset": "numbers",
            "validation_samples": 2,
            "deploy": "best",
            "deploy_name": "best",
        },
    )
    running.wait(running.submit(config, workspace="w", name="second"), "finished")

    def active() -> dict[str, Any] | None:
        answer = running.api.get("/deployments/best")
        found: dict[str, Any] = answer.json().get("deployment", {})
        return found if found.get("status") == "active" else None

    found = eventually(active, within_s=60, what="the best checkpoint is deployed")
    assert found["run_name"] == "second"
    points = running.info("second")["metrics"]["eval/validation/reward"]
    rewards = {point["step"]: point["value"] for point in points}
    assert found["reward"] == max(rewards[2], rewards[4])
    assert found["requested_by"] == "run second"
    client.chat.completions.create(model=str(found["model"]), messages=ASKED, max_tokens=1)


def test_no_more_than_the_setting_allows_are_deployed(running: Platform, deployed: str) -> None:
    names = [
        d["name"] for d in running.get("/deployments")["deployments"] if d["status"] == "active"
    ]
    added = [f"more{number}" for number in range(5 - len(names))]
    for name in added:
        assert deploy(running, "first@2", name)["status"] == "active"
    refused = running.post("/deployments", {"checkpoint": "first@2", "name": "sixth"})
    assert refused.status_code == 409
    assert "HEADRACE_MAX_DEPLOYMENTS" in refused.json()["detail"]
    assert running.get("/deployments")["active_deployments"] == 5
    assert deploy(running, "first@4", "sums")["checkpoint"] == "first@4", "a swap needs no room"


def test_weights_that_vanished_are_reported_and_the_old_version_stays(
    running: Platform, client: openai.OpenAI, deployed: str
) -> None:
    before = running.get("/deployments/sums")["deployment"]["checkpoint"]
    config = run_config(training={"lr": 2e-2}, advanced={"max_steps": 2})
    running.wait(running.submit(config, workspace="w", name="third"), "finished")
    digest = running.get("/checkpoints/third@2")["checkpoint"]["adapter_sha256"]
    files = [*(running.home / "blobs").rglob(digest)]
    assert files
    for file in files:
        file.unlink()
    found = deploy(running, "third@2", "sums")
    assert "do not exist any more" in found["error"]
    assert found["checkpoint"] == before
    client.chat.completions.create(model=deployed, messages=ASKED, max_tokens=1)


def test_the_command_line_deploys_lists_and_undeploys(running: Platform, deployed: str) -> None:
    def headrace(*arguments: str) -> tuple[int, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "producers.cli.main", "model", *arguments, "--json"],
            env=running.environment,
            capture_output=True,
            check=False,
        )
        return done.returncode, json.loads(done.stdout or done.stderr)

    code, refused = headrace("deploy", "first@9", "--name", "sums")
    assert (code, refused["error"]["code"]) == (1, "NOT_FOUND")
    code, made = headrace("deploy", "first@2", "--name", "sums")
    assert (code, made["deployment"]["checkpoint"]) == (0, "first@2")
    code, listed = headrace("list")
    assert "sums" in [one["name"] for one in listed["deployments"]]
    code, shown = headrace("info", "sums")
    assert (code, shown["deployment"]["model"]) == (0, deployed)
    code, ended = headrace("undeploy", "sums")
    assert (code, ended["deployment"]["status"]) == (0, "inactive")
    code, _ = headrace("undeploy", "nobody")
    assert code == 1
