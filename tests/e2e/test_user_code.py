"""Hostile and broken user code: a bad sample is data, and only its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.platform import MAIN, Platform, make_workspace, platform, run_config

pytestmark = [pytest.mark.processes, pytest.mark.torch, pytest.mark.postgres]

HOSTILE = """
import asyncio, os, sys, time
from headrace import AgentWorkflow, Grader


class Hostile(AgentWorkflow):
    async def run(self, ctx):
        reply = await ctx.chat(ctx.prompt)
        row = ctx.metadata["row"]
        if row == 0:
            raise RuntimeError("a workflow raised")
        if row == 1:
            while True:
                time.sleep(0.01)
        if row == 2:
            os._exit(3)
        if row == 3:
            for _ in range(1024):
                sys.stdout.write("x" * (1 << 20))
        if row == 4:
            return None
        assert not hasattr(ctx, "label")
        return [*ctx.prompt, reply]


class Check(Grader):
    async def grade(self, ctx):
        row = ctx.metadata["row"]
        for index, name in enumerate(sorted(ctx.samples)):
            value = float(index)
            if row == 5:
                value = float("nan")
            if row == 6:
                value = "a string"
            if row == 7:
                await asyncio.sleep(3600)
            if row == 8:
                continue
            ctx.set_sample_reward(name, value)
"""

ALL_FAIL = MAIN.replace(
    "reply = await ctx.chat(ctx.prompt)", 'raise RuntimeError("nothing works today")'
)

GRADER_RAISES = MAIN.replace(
    "digits = sum(character.isdigit() for character in sample.text)", "digits = 1 / 0"
)

CALLING = """
from headrace import AgentWorkflow, Grader, tool


@tool
def add(left: int, right: int) -> int:
    return left + right


class Call(AgentWorkflow):
    async def run(self, ctx):
        function = {"name": "add", "arguments": '{"left": 1, "right": 2}'}
        asked = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": function}]}
        [result] = await ctx.call_tools(asked)
        spoken = await ctx.loop([*ctx.prompt, asked, result], max_tokens=4)
        assert result["content"] == "3"
        assert all(message["content"].startswith("error: ") for message in spoken[4::2])


class Check(Grader):
    async def grade(self, ctx):
        for sample in ctx.samples.values():
            assert sample.messages[1]["tool_calls"][0]["function"]["name"] == "add"
            assert sample.messages[2]["content"] == "3"
            ctx.set_sample_reward(sample.name, float(len(sample.text)))
"""

ASKING_AT_ONCE = MAIN.replace(
    "reply = await ctx.chat(ctx.prompt)",
    "reply, *_ = await asyncio.gather(*(ctx.chat(ctx.prompt) for _ in range(4)))",
).replace("from headrace", "import asyncio\nfrom headrace", 1)

ASKING_AGAIN = MAIN.replace(
    "        reply = await ctx.chat(ctx.prompt)\n        return [*ctx.prompt, reply]",
    """        talk = list(ctx.prompt)
        for _ in range(5):
            try:
                talk += [await ctx.chat(talk), {"role": "user", "content": "And?"}]
            except EndpointRefused as error:
                assert error.code == "max_response_length_exceeded"
                assert "at most 10 are allowed (max_response_length)" in str(error)
                return talk[:-1]
        raise AssertionError("the limit was not reached")""",
).replace("from headrace", "from headrace.http import EndpointRefused\nfrom headrace", 1)

REWARD_RAISES = (
    MAIN.replace("AgentWorkflow, Grader", "AgentWorkflow, Grader, reward")
    + """

@reward
def exact(solution_str, ground_truth, extra_info=None, **kwargs):
    return float(int("not a number"))
"""
)

ROWS = "".join(
    f'{{"user_prompt": "Say {n}", "ground_truth": "{n}", "metadata": {{"row": {n}}}}}\n'
    for n in range(10)
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    root = tmp_path_factory.mktemp("hostile")
    files = {
        "rollouts/hostile/main.py": HOSTILE,
        "rollouts/failing/main.py": ALL_FAIL,
        "rollouts/grading/main.py": GRADER_RAISES,
        "rollouts/paying/main.py": REWARD_RAISES,
        "rollouts/calling/main.py": CALLING,
        "rollouts/asking/main.py": ASKING_AT_ONCE,
        "rollouts/again/main.py": ASKING_AGAIN,
    }
    workspace = make_workspace(root / "workspace", files)
    with platform(root / "home") as started:
        started.post("/workspaces", {"url": str(workspace), "name": "w"})
        started.upload("rows", ROWS)
        yield started


def test_bad_samples_are_data_and_the_run_goes_on(running: Platform) -> None:
    config = run_config(
        experiment={"rollout": "hostile", "dataset": "rows"},
        training={
            "rollout_batch_size": 10,
            "n_samples_per_prompt": 2,
            "agent_workflow_timeout_s": 5,
            "grader_timeout_s": 3,
        },
        advanced={"max_steps": 1, "deterministic": False},
    )
    run = running.submit(config, workspace="w")
    info = running.wait(run, "finished", within_s=180)
    assert info["run"]["current_step"] == 1
    samples = running.get(f"/runs/{run}/samples", step=1, limit=50)["samples"]
    failures = {sample["row"]: (sample["failure"] or {}).get("category") for sample in samples}
    assert failures[0] == "agent_error"
    assert failures[1] == "timeout"
    assert failures[2] == "agent_error"
    by_row = {sample["row"]: sample["reward"] for sample in samples}
    assert by_row[5] is None
    assert by_row[6] is None
    assert by_row[7] is None
    assert {s["reward"] for s in samples if s["row"] == 9} == {0.0, 1.0}


def test_a_run_in_which_every_sample_fails_quotes_the_first_error(running: Platform) -> None:
    config = run_config(experiment={"rollout": "failing", "dataset": "rows"})
    info = running.wait(running.submit(config, workspace="w"), "failed")
    assert "nothing works today" in info["run"]["error"]


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
@pytest.mark.parametrize(
    ("rollout", "rewards", "says"),
    [
        ("grading", [], "in grade: ZeroDivisionError: division by zero"),
        ("paying", [{"name": "exact"}], "in exact: ValueError: invalid literal"),
    ],
)
def test_a_run_whose_every_grade_fails_ends_failed_and_names_the_line(
    running: Platform, mode: str, rollout: str, rewards: list[dict[str, str]], says: str
) -> None:
    source = {"grading": GRADER_RAISES, "paying": REWARD_RAISES}[rollout]
    wrong = "1 / 0" if rollout == "grading" else "not a number"
    line = next(n for n, text in enumerate(source.splitlines(), 1) if wrong in text)
    config = run_config(
        experiment={"rollout": rollout, "dataset": "rows"},
        advanced={"rewards": rewards, "execution_mode": mode},
    )
    info = running.wait(running.submit(config, workspace="w"), "failed")
    assert f"grader_error: rollouts/{rollout}/main.py:{line} {says}" in info["run"]["error"]
    assert info["run"]["current_step"] == 0


@pytest.mark.parametrize(
    ("main", "says"),
    [
        ("def broken(:\n", "main.py:1"),
        (MAIN + "\nclass Second(Say):\n    async def run(self, ctx): ...\n", "two"),
        (MAIN.replace("    async def run", "    def run"), "async"),
        (MAIN.split("class Count")[0], "Grader"),
        ("import no_such_module_anywhere\n", "no_such_module_anywhere"),
    ],
)
def test_entry_points_that_cannot_be_used_are_refused(
    running: Platform, tmp_path: Path, main: str, says: str
) -> None:
    workspace = make_workspace(tmp_path / "w", {"rollouts/say/main.py": main})
    name = f"w{abs(hash(main)) % 10**6}"
    assert running.post("/workspaces", {"url": str(workspace), "name": name}).status_code == 201
    config = run_config(experiment={"dataset": "rows"})
    info = running.wait(running.submit(config, workspace=name), "failed", within_s=60)
    assert says in info["run"]["error"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rollout": "nowhere"}, "nowhere"),
        ({"entrypoint": "other.py"}, "other.py"),
        ({"commit_sha": "0123456789abcdef"}, "0123456789abcdef"),
        ({"branch": "no-such-branch"}, "no-such-branch"),
    ],
)
def test_the_error_of_a_run_names_the_missing_part(
    running: Platform, change: dict[str, Any], says: str
) -> None:
    config = run_config(experiment={"dataset": "rows", **change})
    info = running.wait(running.submit(config, workspace="w"), "failed", within_s=60)
    assert says in info["run"]["error"]


def test_a_run_trains_on_conversations_with_tools(running: Platform) -> None:
    config = run_config(
        experiment={"rollout": "calling", "dataset": "rows"},
        training={"rollout_batch_size": 2, "n_samples_per_prompt": 4},
        advanced={"max_steps": 2, "max_turns": 3, "deterministic": False},
    )
    run = running.submit(config, workspace="w")
    info = running.wait(run, "finished", within_s=180)
    assert info["run"]["current_step"] == 2
    samples = running.get(f"/runs/{run}/samples", step=2, limit=50)["samples"]
    assert [sample["failure"] for sample in samples] == [None] * 8
    for sample in samples:
        assert sample["messages"][1]["tool_calls"][0]["name"] == "add"
        assert sample["messages"][2]["content"] == "3"
        assert sum(message["role"] == "assistant" for message in sample["messages"][3:]) <= 3


def test_equal_requests_at_once_get_different_answers_which_a_second_run_gets_again(
    running: Platform,
) -> None:
    config = run_config(
        experiment={"rollout": "asking", "dataset": "rows"}, advanced={"max_steps": 1}
    )
    answers: list[list[list[str]]] = []
    for _ in range(2):
        run = running.submit(config, workspace="w")
        running.wait(run, "finished", within_s=180)
        samples = running.get(f"/runs/{run}/samples", step=1, limit=50)["samples"]
        answers.append(
            [sorted(branch[-1]["content"] for branch in sample["branches"]) for sample in samples]
        )
    assert [len(set(texts)) for texts in answers[0]] == [4] * 8
    assert answers[1] == answers[0]


def test_the_answers_of_a_sample_are_limited_one_by_one_and_together(running: Platform) -> None:
    config = run_config(
        experiment={"rollout": "again", "dataset": "rows"},
        training={"max_response_length": 10, "max_answer_length": 4, "max_prompt_length": 256},
        advanced={"max_steps": 1},
    )
    run = running.submit(config, workspace="w")
    running.wait(run, "finished", within_s=180)
    samples = running.get(f"/runs/{run}/samples", step=1, limit=50)["samples"]
    assert [sample["failure"] for sample in samples] == [None] * 8
    assert [sample["completion_tokens"] for sample in samples] == [10] * 8
    assert all(sample["truncated"] for sample in samples)
    answers = [[m for m in each["messages"] if m["role"] == "assistant"] for each in samples]
    assert min(map(len, answers)) >= 3, "no answer has more than 4 of the 10 tokens"
