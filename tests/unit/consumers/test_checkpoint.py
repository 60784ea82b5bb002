"""The checkpoint consumer writes one manifest per step and answers once, in the order of the
steps."""

import json
from pathlib import Path

import pytest

from consumers.checkpoint import CONSUMER, manifest_json, perform
from schemas.effects import Failed, ManifestPut, SaveCheckpoint
from schemas.errors import CorruptData, FailureCategory
from schemas.events import CheckpointFailed, CheckpointRequested, CheckpointSaved
from schemas.ids import StreamName
from tests.kit.decider import given
from tests.kit.fakes import Bench, bench, damage
from tests.kit.specs import checkpoint_spec, ref, version

STREAM = StreamName("checkpoint-r1")


def requested(step: int) -> CheckpointRequested:
    return CheckpointRequested(run="r1", spec=checkpoint_spec(step), reward=0.75)


def effect(step: int) -> SaveCheckpoint:
    return SaveCheckpoint(spec=checkpoint_spec(step), reward=0.75)


def put(step: int) -> ManifestPut:
    return ManifestPut(effect(step), manifest=ref(f"manifest {step}"))


def saved(step: int) -> CheckpointSaved:
    return CheckpointSaved(
        spec=checkpoint_spec(step), manifest=ref(f"manifest {step}"), reward=0.75
    )


def failed(step: int) -> Failed:
    return Failed(effect(step), FailureCategory.INTERNAL, "the disk is full")


FAILED = CheckpointFailed(run="r1", step=4, message="the disk is full")


def test_a_request_is_an_effect_that_carries_the_reward() -> None:
    given(CONSUMER).when(requested(4)).then(effects=[effect(4)])
    given(CONSUMER, saved(2)).when(requested(4)).then(effects=[effect(4)])


def test_a_step_that_was_answered_decides_nothing() -> None:
    given(CONSUMER, saved(4)).when(requested(4)).then_nothing()
    given(CONSUMER, saved(4), saved(6)).when(requested(4)).then_nothing()
    given(CONSUMER, FAILED).when(requested(4)).then_nothing()


def test_a_manifest_is_announced_once() -> None:
    given(CONSUMER, saved(2)).when(put(4), stream=STREAM).then(events=[saved(4)])
    given(CONSUMER, saved(4)).when(put(4), stream=STREAM).then_nothing()
    given(CONSUMER, saved(4), saved(6)).when(put(4), stream=STREAM).then_nothing()


def test_a_failure_is_told_once() -> None:
    given(CONSUMER).when(failed(4), stream=STREAM).then(events=[FAILED])
    given(CONSUMER, FAILED).when(failed(4), stream=STREAM).then_nothing()
    given(CONSUMER, saved(4)).when(failed(4), stream=STREAM).then_nothing()


def test_the_manifest_is_a_pure_function_of_the_step() -> None:
    first, again = manifest_json(checkpoint_spec(4)), manifest_json(checkpoint_spec(4))
    assert first == again
    content = json.loads(first)
    assert content["files"]["adapter_model.safetensors"] == ref("w4").model_dump()
    assert content["files"]["adapter_config.json"] == ref("{}").model_dump()
    assert content["state"] == ref("s4").model_dump()
    assert content["step"] == content["policy_version"] == 4
    assert content["plan"] == [12, 8]


def test_the_manifest_of_a_skipped_step_names_the_version_it_is_an_alias_of() -> None:
    content = json.loads(manifest_json(checkpoint_spec(5, state=version(4))))
    assert (content["step"], content["policy_version"]) == (5, 4)


def test_a_version_whose_weights_are_nowhere_cannot_be_a_checkpoint() -> None:
    bare = version(4).model_copy(update={"weights": None})
    with pytest.raises(CorruptData, match="only their hash"):
        manifest_json(checkpoint_spec(4, state=bare))


KEY = "runs/r1/ckpt/4/MANIFEST.json"


async def stored(world: Bench, *, plan: tuple[int, ...] = (12, 8)) -> SaveCheckpoint:
    """The effect of a checkpoint whose shards are all stored."""
    put = world.ports.artifacts.put_artifact
    weights, state = await put(b"weights", run="r1"), await put(b"state", run="r1")
    whole = version(4).model_copy(update={"weights": weights, "state": state})
    files = {"adapter_config.json": await put(b"{}", run="r1")}
    spec = checkpoint_spec(4, state=whole).model_copy(update={"files": files, "plan": plan})
    return SaveCheckpoint(spec=spec, reward=0.5)


async def test_performing_puts_the_manifest(tmp_path: Path) -> None:
    world = bench(tmp_path)
    effect = await stored(world)
    outcome = await perform(effect, world.ports)
    assert await world.ports.artifacts.get_artifact(outcome.manifest) == manifest_json(effect.spec)
    assert await world.blobs.exists(KEY) == outcome.manifest.uri


async def test_a_manifest_that_is_there_is_adopted(tmp_path: Path) -> None:
    world = bench(tmp_path)
    effect = await stored(world)
    first = await perform(effect, world.ports)
    assert await perform(effect, world.ports) == first


async def test_the_first_manifest_wins_where_its_shards_are_whole(tmp_path: Path) -> None:
    world = bench(tmp_path)
    first = await perform(await stored(world), world.ports)
    second = await perform(await stored(world, plan=(20,)), world.ports)
    assert second.manifest == first.manifest


async def test_another_manifest_whose_shards_are_damaged_is_not_adopted(tmp_path: Path) -> None:
    world = bench(tmp_path)
    other = await stored(world)
    shard = await world.ports.artifacts.put_artifact(b"shard of another", run="r1")
    files = {"adapter_config.json": shard}
    await perform(
        other.model_copy(update={"spec": other.spec.model_copy(update={"files": files})}),
        world.ports,
    )
    damage(shard.uri)
    with pytest.raises(CorruptData):
        await perform(await stored(world), world.ports)


async def test_a_file_that_is_not_a_manifest_is_not_adopted(tmp_path: Path) -> None:
    world = bench(tmp_path)
    await world.blobs.put_blob(KEY, b"not json")
    with pytest.raises(CorruptData, match="not a manifest"):
        await perform(await stored(world), world.ports)


@pytest.mark.parametrize("shard", ["weights", "state"])
async def test_a_damaged_shard_leaves_no_manifest(tmp_path: Path, shard: str) -> None:
    world = bench(tmp_path)
    effect = await stored(world)
    state = effect.spec.state
    found = state.weights if shard == "weights" else state.state
    assert found is not None
    damage(found.uri)
    with pytest.raises(CorruptData):
        await perform(effect, world.ports)
    assert await world.blobs.exists(KEY) is None
