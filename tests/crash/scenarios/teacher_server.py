"""A run that distils a teacher on a server, while what asks the server and what learns is killed. The
server is down for a while too. The run ends in the weights of a run that nobody disturbs, and its log
rebuilds them without the server."""

from tests.chaos.trials import verified
from tests.kit.kills import Points, Stage
from tests.kit.ledger import check
from tests.kit.platform import final_adapter, run_config
from tests.kit.provider import Reply, provider_in_thread
from tests.kit.teacher import MODEL, FakeTeacher

KEY = "sk-the-key-of-the-teacher-8472"
STEPS = 6
POINTS: Points = {
    "grade.perform.GradeGroup.claimed": 2,
    "grade.perform.GradeGroup.effect_done": 3,
    "grade.perform.GradeGroup.tx_after_commit": 2,
    "learn.perform.TrainStep.effect_done": 2,
}
DOWN = range(20, 30)
"""The requests that the server does not answer."""


def act(stage: Stage) -> str:
    """The hash of the last adapter."""
    teacher = FakeTeacher()

    def answer(number: int, body: object) -> Reply:
        teacher.fault = "down" if number in DOWN else None
        return teacher(number, body)

    with provider_in_thread(answer) as fake:
        address = fake.base_url.removeprefix("http://").removesuffix("/v1")
        config = run_config(
            advanced={
                "algorithm": "distill",
                "execution_mode": "one_step_off_async",
                "teacher": f"provider:{MODEL}",
                "teacher_base_url": fake.base_url,
                "teacher_api_key_secret": "TEACHER_KEY",
                "max_steps": STEPS,
                "state_interval": 2,
                "seed": 8,
            }
        )
        with stage.platform({"HEADRACE_NETWORK_ALLOW": f"w={address}"}) as running:
            put = running.api.put("/secrets/TEACHER_KEY", json={"value": KEY, "workspace": "w"})
            assert put.status_code == 201, put.text
            run = running.submit(config, workspace="w")
            info = running.wait(run, "finished", within_s=300)
            check(running.events(run), steps=STEPS, groups=2, samples=4)
            asked = len(teacher.asked)
            assert asked >= STEPS * 2 * 4
            verified(running, run)
            assert len(teacher.asked) == asked, "a replay asks no teacher"
            assert set(fake.keys) == {f"Bearer {KEY}"}
            assert any(point["value"] != 0 for point in info["metrics"]["train/loss"])
            return final_adapter(info)
