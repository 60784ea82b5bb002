"""The deploy consumer: which version each name serves, whatever comes twice, late or fails."""

from typing import Any

import pytest

from consumers.deploy.consumer import CONSUMER, DeploymentsState
from schemas.artifact_refs import ArtifactRef
from schemas.deployments import ServedModel, deployment_id
from schemas.effects import CheckpointChosen, ChooseCheckpoint, Failed, LoadModel, ModelLoaded
from schemas.errors import FailureCategory
from schemas.events import (
    ModelDeployed,
    ModelDeployFailed,
    ModelDeployRequested,
    ModelDeploySkipped,
    ModelUndeployed,
    ModelUndeployRequested,
    RunFinished,
)
from schemas.ids import model_stream
from schemas.sampling import ModelRef, PolicyRef
from tests.kit.decider import given

STREAM = model_stream()
BASE = ModelRef(kind="scratch", name="qwen3-tiny", seed=1)
OTHER_BASE = ModelRef(kind="scratch", name="qwen3-tiny", seed=2)


def served(step: int, *, name: str = "sums", **more: Any) -> ServedModel:
    weights = ArtifactRef(uri=f"file:///w{step}", sha256=f"{step:064d}", size=9)
    fields: dict[str, Any] = {
        "name": name,
        "base_name": "scratch:qwen3-tiny",
        "model": BASE,
        "policy": PolicyRef(version=step, weights=weights),
        "lora_alpha": 32,
        "run": "r1",
        "run_name": "calm-otter",
        "step": step,
    }
    return ServedModel(**{**fields, **more})


def asked(step: int, *, name: str = "sums", **more: Any) -> ModelDeployRequested:
    model = served(step, name=name, **more)
    return ModelDeployRequested(
        deployment=name, scope=scope_of(model), request=f"q{step}-{name}", served=model
    )


def scope_of(model: ServedModel) -> str:
    return model.workspace or ""


def load(step: int, *, name: str = "sums", others: int = 0, **more: Any) -> LoadModel:
    model = served(step, name=name, **more)
    return LoadModel(request=f"q{step}-{name}", served=model, others=others, scope=scope_of(model))


def deployed(step: int, number: int, *, name: str = "sums", **more: Any) -> ModelDeployed:
    model = served(step, name=name, **more)
    return ModelDeployed(
        deployment=name,
        scope=scope_of(model),
        request=f"q{step}-{name}",
        served=model,
        number=number,
    )


def failed(effect: LoadModel | ChooseCheckpoint, message: str = "it is gone") -> Failed:
    return Failed(effect, FailureCategory.VALIDATION, message)


def test_a_request_is_loaded_and_then_served() -> None:
    given(CONSUMER).when(asked(2)).then(effects=[load(2)])
    given(CONSUMER, asked(2)).when(asked(2)).then(effects=[load(2)])
    loaded = given(CONSUMER, asked(2)).when(ModelLoaded(load(2)), stream=STREAM)
    loaded.then(events=[deployed(2, 1)])


def test_a_request_that_is_answered_decides_nothing_when_it_comes_again() -> None:
    given(CONSUMER, asked(2), deployed(2, 1)).when(asked(2)).then()
    again = given(CONSUMER, asked(2), deployed(2, 1)).when(ModelLoaded(load(2)), stream=STREAM)
    again.then()


def test_the_old_version_is_served_until_the_new_one_is_loaded_or_fails() -> None:
    before = (asked(2), deployed(2, 1), asked(4))
    assert given(CONSUMER, *before).state(STREAM).active["sums"].step == 2
    loaded = given(CONSUMER, *before).when(ModelLoaded(load(4)), stream=STREAM)
    loaded.then(events=[deployed(4, 2)])
    broken = given(CONSUMER, *before).when(failed(load(4)), stream=STREAM)
    why = ModelDeployFailed(deployment="sums", scope="", request="q4-sums", message="it is gone")
    broken.then(events=[why])
    after: DeploymentsState = given(CONSUMER, *before, why).state(STREAM)
    assert after.active["sums"].step == 2
    assert not after.pending


def test_a_newer_request_replaces_one_that_is_being_loaded() -> None:
    before = (asked(2), asked(4))
    late = given(CONSUMER, *before).when(ModelLoaded(load(2)), stream=STREAM)
    late.then()
    given(CONSUMER, *before).when(asked(2)).then()
    given(CONSUMER, *before).when(failed(load(2)), stream=STREAM).then()
    loaded = given(CONSUMER, *before).when(ModelLoaded(load(4)), stream=STREAM)
    loaded.then(events=[deployed(4, 1)])


def test_an_effect_knows_how_many_others_are_deployed_or_were_requested_before() -> None:
    before = (asked(2), deployed(2, 1), asked(1, name="b"), asked(1, name="c"))
    given(CONSUMER, *before).when(asked(1, name="b")).then(effects=[load(1, name="b", others=1)])
    given(CONSUMER, *before).when(asked(1, name="c")).then(effects=[load(1, name="c", others=2)])
    given(CONSUMER, *before).when(asked(4)).then(effects=[load(4, others=2)])


def test_a_checkpoint_of_another_base_fails() -> None:
    before = (asked(2), deployed(2, 1))
    [event] = given(CONSUMER, *before).when(asked(4, model=OTHER_BASE)).events
    assert isinstance(event, ModelDeployFailed)
    assert "another base model" in event.message
    alone = given(CONSUMER).when(asked(4, model=OTHER_BASE))
    alone.then(effects=[load(4, model=OTHER_BASE)])  # the twin


def test_a_refusal_does_not_name_the_deployments_of_another_workspace() -> None:
    theirs: dict[str, Any] = {"workspace": "w1", "reward": 0.9, "run_name": "quiet-fox"}
    before = (asked(2, **theirs), deployed(2, 1, **theirs))
    other_base = asked(1, name="b", workspace="w2", model=OTHER_BASE)
    [refused] = given(CONSUMER, *before).when(other_base).events
    assert isinstance(refused, ModelDeployFailed)
    assert "another workspace" in refused.message
    assert "quiet-fox" not in refused.message
    assert "deployment sums" not in refused.message
    same = asked(1, name="b", workspace="w1", model=OTHER_BASE)
    [told] = given(CONSUMER, *before).when(same).events
    assert isinstance(told, ModelDeployFailed)
    assert "the deployment sums" in told.message, "the twin"


def test_two_bases_that_are_loaded_together_do_not_both_become_active() -> None:
    before = (asked(2), asked(1, name="b", model=OTHER_BASE), deployed(2, 1))
    late = ModelLoaded(load(1, name="b", model=OTHER_BASE))
    [event] = given(CONSUMER, *before).when(late, stream=STREAM).events
    assert isinstance(event, ModelDeployFailed)


def test_an_undeployed_name_is_free_and_a_load_that_ends_late_changes_nothing() -> None:
    end = ModelUndeployRequested(deployment="sums", scope="", request="e1")
    gone = ModelUndeployed(deployment="sums", scope="", request="e1")
    given(CONSUMER, asked(2), deployed(2, 1)).when(end).then(events=[gone])
    given(CONSUMER, asked(2)).when(end).then(events=[gone])
    given(CONSUMER).when(end).then()
    given(CONSUMER, asked(2), deployed(2, 1), gone).when(end).then()
    late = given(CONSUMER, asked(2), gone).when(ModelLoaded(load(2)), stream=STREAM)
    late.then()
    given(CONSUMER, asked(2), deployed(2, 1), gone).when(asked(4)).then(effects=[load(4)])


CHOOSE = ChooseCheckpoint(run="r1", name="sums")


def chosen(step: int, reward: float) -> CheckpointChosen:
    return CheckpointChosen(CHOOSE, served(step, reward=reward))


def test_a_finished_run_that_asks_for_it_deploys_its_best_checkpoint() -> None:
    given(CONSUMER).when(RunFinished(run="r1", step=9, deploy_as="sums")).then(effects=[CHOOSE])
    assert CONSUMER.routes(RunFinished(run="r1", step=9)) == ()
    made = given(CONSUMER).when(chosen(4, 0.5), stream=STREAM)
    model = served(4, reward=0.5)
    wanted = ModelDeployRequested(deployment="sums", scope="", request="best-r1", served=model)
    effect = LoadModel(request="best-r1", served=model, others=0, scope="")
    made.then(events=[wanted], effects=[effect])
    given(CONSUMER, wanted).when(chosen(4, 0.5), stream=STREAM).then()


@pytest.mark.parametrize(("now", "deploys"), [(0.4, True), (0.5, False), (0.6, False)])
def test_a_checkpoint_is_deployed_only_if_it_beats_the_one_that_is(
    now: float, *, deploys: bool
) -> None:
    before = (asked(2, reward=now), deployed(2, 1, reward=now))
    made = given(CONSUMER, *before).when(chosen(4, 0.5), stream=STREAM)
    kinds = [type(event) for event in made.events]
    assert kinds == [ModelDeployRequested if deploys else ModelDeploySkipped]


def best_of(run: str, step: int, reward: float, **more: Any) -> ModelDeployRequested:
    model = served(step, run=run, run_name=run, reward=reward, **more)
    return ModelDeployRequested(deployment="sums", request=f"best-{run}", served=model)


@pytest.mark.parametrize(("loading", "deploys"), [(0.4, True), (0.5, False), (0.6, False)])
def test_a_better_checkpoint_that_is_being_loaded_stays(loading: float, *, deploys: bool) -> None:
    """The worse one took its place, and no run was told."""
    before = best_of("r2", 2, loading)
    made = given(CONSUMER, before).when(chosen(4, 0.5), stream=STREAM)
    skipped, *requested = made.events
    assert isinstance(skipped, ModelDeploySkipped)
    assert [type(event) for event in requested] == [ModelDeployRequested] * deploys
    assert skipped.run == ("r2" if deploys else "r1"), "the run that lost is told"
    words = "which was being loaded" if deploys else f"r2@2 with {loading:.4g} is being loaded"
    assert words in skipped.reason
    late = given(CONSUMER, before, *made.events).state(STREAM).pending["sums"]
    assert late.served.step == (4 if deploys else 2)


def test_a_request_of_a_user_that_is_replaced_is_not_told_as_a_run() -> None:
    before = asked(2, reward=0.1)
    made = given(CONSUMER, before).when(chosen(4, 0.5), stream=STREAM)
    assert [type(event) for event in made.events] == [ModelDeployRequested]


def test_equal_names_of_two_workspaces_are_two_deployments() -> None:
    """Each is loaded, served, compared and ended by itself, whatever becomes of the other."""
    ours: dict[str, Any] = {"workspace": "w1"}
    theirs: dict[str, Any] = {"workspace": "w2", "reward": 0.9}
    both = (asked(2, **ours), asked(4, **theirs))
    given(CONSUMER, *both).when(asked(4, **theirs)).then(effects=[load(4, others=1, **theirs)])
    first = given(CONSUMER, *both).when(ModelLoaded(load(4, **theirs)), stream=STREAM)
    first.then(events=[deployed(4, 1, **theirs)])
    served_both = (*both, deployed(4, 1, **theirs), deployed(2, 2, **ours))
    state: DeploymentsState = given(CONSUMER, *served_both).state(STREAM)
    assert {key: model.step for key, model in state.active.items()} == {"w1/sums": 2, "w2/sums": 4}
    end = ModelUndeployRequested(deployment="sums", scope="w2", request="e1")
    gone = ModelUndeployed(deployment="sums", scope="w2", request="e1")
    given(CONSUMER, *served_both).when(end).then(events=[gone])
    after: DeploymentsState = given(CONSUMER, *served_both, gone).state(STREAM)
    assert list(after.active) == ["w1/sums"]
    worse = CheckpointChosen(CHOOSE, served(6, workspace="w1", reward=0.5))
    event, *_ = given(CONSUMER, *served_both).when(worse, stream=STREAM).events
    assert isinstance(event, ModelDeployRequested), "theirs with 0.9 is not the one to beat"


def test_twin_names_without_their_workspaces_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of earlier releases: one of the two takes the place of the other."""
    for module in ("schemas.deployments", "consumers.deploy.consumer"):
        monkeypatch.setattr(f"{module}.deployment_key", lambda name, workspace: name)
    both = (asked(2, workspace="w1"), asked(4, workspace="w2"))
    state: DeploymentsState = given(CONSUMER, *both).state(STREAM)
    assert {key: one.served.step for key, one in state.pending.items()} == {"sums": 4}
    lost = given(CONSUMER, *both).when(ModelLoaded(load(2, workspace="w1")), stream=STREAM)
    lost.then()


def old(event: Any) -> Any:
    """An event as an earlier release wrote it."""
    return event.model_copy(update={"scope": None})


def test_events_of_earlier_releases_mean_the_holder_of_the_name() -> None:
    """The name was held by w1, was refused to w2, was freed, and then deployed by w2."""
    refused = ModelDeployFailed(deployment="sums", request="q4-sums", message="in use")
    gone = ModelUndeployed(deployment="sums", request="e1")
    begun = (old(asked(2, workspace="w1")), old(asked(4, workspace="w2")), refused)
    served_one = (*begun, old(deployed(2, 1, workspace="w1")))
    state: DeploymentsState = given(CONSUMER, *served_one).state(STREAM)
    assert (list(state.active), dict(state.pending)) == (["w1/sums"], {})
    given(CONSUMER, *served_one).when(old(asked(4, workspace="w2"))).then()
    again = old(asked(6, workspace="w2"))
    passed_on = (*served_one, gone, again, old(deployed(6, 2, workspace="w2")))
    after: DeploymentsState = given(CONSUMER, *passed_on).state(STREAM)
    assert list(after.active) == ["w2/sums"]
    asked_before = ModelUndeployRequested(deployment="sums", request="e2")
    [ended] = given(CONSUMER, *passed_on).when(asked_before).events
    assert ended == ModelUndeployed(deployment="sums", scope="w2", request="e2")
    two = (*passed_on, asked(8, workspace="w1"))
    given(CONSUMER, *two).when(asked_before).then()


def test_ids_of_deployments_from_before_are_unchanged() -> None:
    before = old(asked(2, workspace="w1"))
    assert before.run_id == old(asked(2)).run_id == asked(2).run_id == deployment_id("sums")
    assert "scope" not in before.model_dump_json()
    effect = LoadModel(request="q", served=served(2, workspace="w1"), others=0)
    assert effect.run_id == deployment_id("sums")
    assert "scope" not in effect.model_dump_json()
    assert len({asked(2, workspace=place).run_id for place in (None, "w1", "w2")}) == 3


def test_a_version_whose_reward_is_not_known_is_replaced() -> None:
    before = (asked(2), deployed(2, 1))
    made = given(CONSUMER, *before).when(chosen(4, 0.5), stream=STREAM)
    assert [type(event) for event in made.events] == [ModelDeployRequested]


def test_a_run_without_a_held_out_reward_deploys_nothing_and_says_why() -> None:
    none = CheckpointChosen(CHOOSE, None, "no checkpoint has a held-out reward")
    skipped = ModelDeploySkipped(
        deployment="sums", scope="", request="best-r1", run="r1", reason=none.reason
    )
    given(CONSUMER).when(none, stream=STREAM).then(events=[skipped])
    given(CONSUMER, skipped).when(none, stream=STREAM).then()
    [event] = given(CONSUMER).when(failed(CHOOSE), stream=STREAM).events
    assert isinstance(event, ModelDeploySkipped)
