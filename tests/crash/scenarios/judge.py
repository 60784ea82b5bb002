"""kill -9 around the answers of a judge: each judgement is made once, and the weights stay the same.

The judge is a server on this machine that limits the rate and answers prose now and then. By one rubric
it scores each answer, by the other it compares those of a group.
"""

import hashlib
import json
import re
from collections import Counter
from typing import Any

from tests.kit.kills import Stage
from tests.kit.platform import final_adapter, run_config, verify
from tests.kit.provider import Reply, completion, provider_in_thread, refusal

KEY = "sk-the-key-of-the-judge-8472"
POINTS = {"judge.answered": 3, "judge.recorded": 3}
AT_ONCE = 10
"""Questions that are open when a process is killed: those about both groups of a step."""


def without_fence(question: str) -> str:
    """A question without the random text that each request draws for its tags."""
    return re.sub(r"(</?[a-z0-9-]+)-[0-9a-f]+>", r"\1>", question)


def score(question: str) -> float:
    """A score that follows from what the judge reads."""
    return hashlib.sha256(question.encode()).digest()[0] / 255


def scores(question: str) -> list[dict[str, object]]:
    """The scores of the answers of a group, the last one first, as any order is allowed."""
    found = re.findall(r"<answer-([0-9]+)>\n(.*?)\n</answer-", question, re.DOTALL)
    return [
        {"answer": int(number), "explanation": f"number {number}", "score": score(text)}
        for number, text in reversed(found)
    ]


class Judge:
    """Counts its answers by question."""

    def __init__(self) -> None:
        self.scored: Counter[str] = Counter()
        self.requests = 0

    def __call__(self, _: int, body: Any) -> Reply:
        self.requests += 1
        if self.requests % 7 == 3:
            return refusal(429, "slow down", retry_after="0.2")
        if self.requests % 11 == 5 and len(body["messages"]) == 2:
            return completion("I like it.")
        question = without_fence(body["messages"][1]["content"])
        self.scored[question] += 1
        if body["messages"][0]["content"].startswith(
            "You are a strict and fair judge. You compare"
        ):
            return completion(json.dumps({"scores": scores(question)}))
        return completion(json.dumps({"explanation": "so it is", "score": score(question)}))


def act(stage: Stage) -> None:
    judge = Judge()
    with provider_in_thread(judge) as fake:
        address = fake.base_url.removeprefix("http://").removesuffix("/v1")
        rubric = {
            "name": "liked",
            "text": "Is it likeable?",
            "model": "small",
            "base_url": fake.base_url,
            "api_key_secret": "JUDGE_KEY",
        }
        compared = {**rubric, "name": "better", "text": "Which is better?", "scope": "group"}
        config = run_config(advanced={"max_steps": 2, "rubrics": [rubric, compared]})
        with stage.platform({"HEADRACE_NETWORK_ALLOW": f"w={address}"}) as running:
            refused = running.post("/runs", {"config": config, "workspace": "w"})
            assert refused.status_code == 400
            assert "headrace secret set JUDGE_KEY" in refused.text
            put = running.api.put("/secrets/JUDGE_KEY", json={"value": KEY, "workspace": "w"})
            assert put.status_code == 201, put.text
            killed = running.submit(config, workspace="w")
            info = running.wait(killed, "finished", within_s=200)
            samples = running.get(f"/runs/{killed}/samples", limit=50)["samples"]
            after_kills = sum(judge.scored.values())
            groups = sum("<answer-1>" in question for question in judge.scored)
            calm = running.wait(running.submit(config, workspace="w"), "finished")
            events = json.dumps(running.events(killed))
            asked = judge.requests
            verified = verify(running, killed)
            assert (verified["status"], verified["findings"]) == ("verified", []), verified
            assert judge.requests == asked, "a replay asks no judge"
    assert final_adapter(info) == final_adapter(calm)
    assert len(samples) == 16
    for sample in samples:
        liked, better = sample["judgements"]
        assert liked["score"] == sample["parts"]["liked"]
        assert liked["explanation"] == "so it is"
        assert better["score"] == sample["parts"]["better"] == score(sample["text"])
    assert len({sample["judgements"][1]["explanation"] for sample in samples}) == 4
    assert groups == 4
    assert after_kills <= len(samples) + groups + len(stage.points) * AT_ONCE
    assert set(fake.keys) == {f"Bearer {KEY}"}
    assert KEY not in events
    logs = [path for path in stage.home.rglob("*.log") if path.is_file()]
    assert logs
    assert not [path for path in logs if KEY in path.read_text(errors="replace")]
