"""A teacher on a server, on the platform: it teaches, is waited for, and answers wrong."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.kit.platform import Platform, eventually, make_workspace, platform, run_config, verify
from tests.kit.provider import FakeProvider, provider_in_thread
from tests.kit.teacher import MODEL, FakeTeacher, Fault, texts_of

pytestmark = [
    pytest.mark.kills,
    pytest.mark.processes,
    pytest.mark.torch,
    pytest.mark.postgres,
    pytest.mark.slow,
]


@dataclass
class School:
    """A platform, and a teacher on a server that it may reach."""

    running: Platform
    teacher: FakeTeacher
    fake: FakeProvider

    def submit(self, name: str, *, training: dict[str, Any] | None = None, **keys: Any) -> str:
        advanced = {
            "algorithm": "distill",
            "teacher": f"provider:{MODEL}",
            "teacher_base_url": self.fake.base_url,
            **keys,
        }
        config = run_config(training=training or {}, advanced=advanced)
        return self.running.submit(config, workspace="w", name=name)


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> Iterator[School]:
    root, teacher = tmp_path_factory.mktemp("school"), FakeTeacher()
    workspace = make_workspace(root / "workspace")
    with provider_in_thread(teacher) as fake:
        address = fake.base_url.removeprefix("http://").removesuffix("/v1")
        environment = {"HEADRACE_NETWORK_ALLOW": f"w={address}"}
        with platform(root / "home", environment=environment) as running:
            made = running.post("/workspaces", {"url": str(workspace), "name": "w"})
            assert made.status_code == 201, made.text
            running.upload("numbers")
            yield School(running, teacher, fake)


def test_a_run_learns_from_a_server_and_is_rebuilt_without_it(school: School) -> None:
    """The teacher likes digits. Its server is away at first, and again when the run is verified."""
    teacher, running = school.teacher, school.running
    teacher.fault = "down"
    sizes = {"lr": 1e-2, "rollout_batch_size": 4}
    run = school.submit("taught", training=sizes, max_steps=15, tuning="full")
    eventually(lambda: teacher.asked or None, within_s=120, what="the teacher is asked")
    teacher.fault = None
    info = running.wait(run, "finished", within_s=240)
    asked = len(teacher.asked)
    assert asked >= 15 * 16
    assert set(school.fake.paths) == {"/v1/completions"}
    values = [point["value"] for point in info["metrics"]["train/teacher_kl"]]
    assert sum(values[-3:]) < sum(values[:3]) / 2, values
    teacher.fault = "down"
    assert verify(running, run)["status"] == "verified"
    assert len(teacher.asked) == asked


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("nan", "gives token [0-9]+ in place [0-9]+ the log-probability nan"),
        ("unnamed", "has no prompt_logprobs; check that the base URL is that of a vLLM server"),
    ],
)
def test_a_teacher_that_never_answers_well_ends_its_run_with_the_reason(
    school: School, fault: Fault, says: str
) -> None:
    school.teacher.fault, school.teacher.fault_from = fault, -1
    run = school.submit(f"teacher-{fault}")
    error = school.running.wait(run, "failed", within_s=200)["run"]["error"]
    assert re.search(says, error), error
    assert re.search("about row 0 of sample [0-3] of group .*row [0-9]+ of the dataset", error), (
        error
    )


def test_a_teacher_with_another_vocabulary_ends_its_run_by_name(
    school: School, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = texts_of("qwen3-tiny")
    school.teacher.fault = None
    monkeypatch.setattr(school.teacher, "texts", (*own[:9], *reversed(own[9:])))
    error = school.running.wait(school.submit("other-words"), "failed")["run"]["error"]
    assert f"advanced.teacher 'provider:{MODEL}' has another vocabulary" in error, error
