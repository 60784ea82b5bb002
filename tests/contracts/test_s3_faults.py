"""A store that is busy, slow, or cuts connections: no blob is torn, and no two writers win."""

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from consumers.checkpoint import Manifest, manifest_json, perform
from infra.blobs.artifacts import ArtifactStore, check_content
from infra.blobs.s3.multipart import PART_BYTES, WHOLE_BYTES
from infra.blobs.s3.store import S3Blobs
from infra.ports.services import BlobExists
from schemas.effects import ManifestPut, SaveCheckpoint
from schemas.errors import CorruptData, NotFound, TransientError
from tests.kit.fakes import bench
from tests.kit.faulty_proxy import Fault, FaultyProxy, Request, calm, chance, faulty_proxy, first
from tests.kit.s3 import Bucket
from tests.kit.specs import checkpoint_spec, version

pytestmark = pytest.mark.s3

KEY = "runs/r/ckpt/1/MANIFEST.json"
PASSING = tuple(fault for fault in Fault if fault is not Fault.UNKNOWN)
DONE = (Fault.LOST, Fault.LATE_BUSY, Fault.LATE_CONFLICT, Fault.TORN, Fault.SLOW_ANSWER)
"""The faults that look like a failure of a request that succeeded."""


LATE = (Fault.SLOW, Fault.SLOW_ANSWER)


@pytest.fixture
def proxy(bucket: Bucket) -> Iterator[FaultyProxy]:
    with faulty_proxy(bucket.server.endpoint, delay_s=0.8) as running:
        yield running


@pytest.fixture
def blobs(bucket: Bucket, proxy: FaultyProxy) -> S3Blobs:
    """The store behind the proxy, with a time-out shorter than the proxy's delay."""
    return S3Blobs(bucket.store(endpoint=proxy.endpoint, read_s=0.5))


@pytest.mark.parametrize("fault", PASSING)
async def test_every_call_survives_a_fault_that_passes(
    blobs: S3Blobs, proxy: FaultyProxy, fault: Fault
) -> None:
    twice = (fault, fault) if fault not in LATE else (fault,)
    proxy.plan = first(*twice)
    uri = await blobs.put_blob("runs/r/x", b"content" * 1000)
    proxy.plan = first(*twice)
    assert await blobs.get_blob(uri) == b"content" * 1000
    proxy.plan = first(*twice)
    assert await blobs.exists("runs/r/x") == uri
    proxy.plan = first(*twice)
    assert [blob.key for blob in await blobs.keys("")] == ["runs/r/x"]
    proxy.plan = first(*twice)
    await blobs.delete(uri)
    assert await blobs.exists("runs/r/x") is None
    assert proxy.seen[fault] >= 5


@pytest.mark.parametrize("fault", PASSING)
async def test_a_create_only_put_wins_once_whatever_becomes_of_its_answer(
    blobs: S3Blobs, bucket: Bucket, proxy: FaultyProxy, fault: Fault
) -> None:
    proxy.plan = first(fault, fault, method="PUT")
    uri = await blobs.put_blob(KEY, b"mine", create_only=True)
    assert await blobs.get_blob(uri) == b"mine"
    proxy.plan = first(fault, fault, method="PUT")
    for same in (b"mine", b"theirs"):
        with pytest.raises(BlobExists):
            await blobs.put_blob(KEY, same, create_only=True)
    assert bucket.contents() == {KEY: b"mine"}


class Forgetful(S3Blobs):
    """A store that does not recognise its own objects."""

    async def _made_by(self, put: str, key: str) -> bool:
        return False


async def test_twin_without_the_put_s_id_a_winner_believes_it_lost(
    bucket: Bucket, proxy: FaultyProxy
) -> None:
    blobs = Forgetful(bucket.store(endpoint=proxy.endpoint))
    proxy.plan = first(Fault.LOST, method="PUT")
    with pytest.raises(BlobExists):
        await blobs.put_blob(KEY, b"mine", create_only=True)
    assert bucket.contents() == {KEY: b"mine"}


@pytest.mark.slow
async def test_races_through_faults_have_one_winner_each(
    bucket: Bucket, proxy: FaultyProxy
) -> None:
    faults = (
        Fault.BUSY,
        Fault.CONFLICT,
        Fault.CUT,
        *(f for f in DONE if f is not Fault.SLOW_ANSWER),
    )
    proxy.plan = chance(6, rate=0.3, faults=faults)
    writers = [S3Blobs(bucket.store(endpoint=proxy.endpoint)) for _ in range(2)]

    async def write(blobs: S3Blobs, key: str, data: bytes) -> bytes | None:
        try:
            await blobs.put_blob(key, data, create_only=True)
        except BlobExists:
            return None
        return data

    for step in range(12):
        key = f"runs/r/ckpt/{step}/MANIFEST.json"
        wrote = await asyncio.gather(*(write(writers[n % 2], key, b"%d" % n) for n in range(8)))
        won = [data for data in wrote if data is not None]
        assert len(won) == 1, f"step {step}: {won}"
        assert bucket.read(key) == won[0]
    assert min(proxy.seen[fault] for fault in faults) > 0


def on_s3(ports: Any, blobs: S3Blobs) -> Any:
    """The same ports over a bucket."""
    artifacts = ArtifactStore(ports.log, blobs, cache_bytes=0)
    return replace(ports, blobs=blobs, artifacts=artifacts)


async def saved(ports: Any, step: int) -> ManifestPut:
    """Save a step as the checkpoint consumer does: first the shards, then the manifest."""
    put = ports.artifacts.put_artifact
    weights = await put(b"weights of %d" % step * 500, run="r1")
    state = await put(b"state of %d" % step, run="r1")
    whole = version(step).model_copy(update={"weights": weights, "state": state})
    files = {"adapter_config.json": await put(b"{}", run="r1")}
    spec = checkpoint_spec(step, state=whole).model_copy(update={"files": files})
    return await perform(SaveCheckpoint(spec=spec, reward=0.5), ports)


async def readable(ports: Any, outcome: ManifestPut) -> None:
    """Check that the manifest is the step's, and that every byte that it names is stored."""
    data = check_content(outcome.manifest, await ports.blobs.get_blob(outcome.manifest.uri))
    assert data == manifest_json(outcome.effect.spec)
    manifest = Manifest.model_validate_json(data)
    for ref in (*manifest.files.values(), *([manifest.state] if manifest.state else [])):
        check_content(ref, await ports.blobs.get_blob(ref.uri))


@pytest.mark.slow
async def test_two_workers_save_checkpoints_through_faults_and_tell_the_same(
    bucket: Bucket, proxy: FaultyProxy, tmp_path: Path
) -> None:
    faults = tuple(fault for fault in PASSING if fault not in LATE)
    proxy.plan = chance(10, rate=0.25, faults=faults)
    world = bench(tmp_path)
    workers = [
        on_s3(world.ports, S3Blobs(bucket.store("p", endpoint=proxy.endpoint))) for _ in range(2)
    ]
    direct = on_s3(world.ports, bucket.blobs("p"))
    for step in range(1, 9):
        one, other = await asyncio.gather(*(saved(ports, step) for ports in workers))
        assert one == other
        await readable(direct, one)
    manifests = [key for key in bucket.contents() if key.endswith("MANIFEST.json")]
    assert len(manifests) == 8


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.LATE_BUSY, Fault.LATE_CONFLICT])
async def test_a_manifest_whose_answer_was_lost_is_adopted_by_the_next_attempt(
    bucket: Bucket, proxy: FaultyProxy, tmp_path: Path, fault: Fault
) -> None:
    world = bench(tmp_path)
    impatient = S3Blobs(bucket.store(endpoint=proxy.endpoint, patience_s=0, read_s=0.5))
    ports = on_s3(world.ports, impatient)

    def only_the_manifest(request: Request) -> Fault | None:
        return fault if request.method == "PUT" and "MANIFEST" in request.target else None

    proxy.plan = only_the_manifest
    with pytest.raises(TransientError):
        await saved(ports, 4)
    proxy.plan = calm
    await readable(on_s3(world.ports, bucket.blobs()), await saved(ports, 4))


@pytest.mark.parametrize(
    "fault", [Fault.BUSY, Fault.CONFLICT, Fault.CUT, Fault.UNKNOWN], ids=lambda f: f.name
)
async def test_a_put_that_never_arrives_raises_and_leaves_no_object(
    bucket: Bucket, proxy: FaultyProxy, fault: Fault
) -> None:
    proxy.plan = lambda request: fault
    blobs = S3Blobs(bucket.store(endpoint=proxy.endpoint, patience_s=0.5))
    for put in (
        lambda: blobs.put_blob(KEY, b"x", create_only=True),
        lambda: blobs.put_blob("large", b"x" * (WHOLE_BYTES + 1)),
    ):
        with pytest.raises(TransientError, match=proxy.endpoint):
            await put()
    assert not bucket.contents()


BIG = hashlib.sha256(b"seed").digest() * ((WHOLE_BYTES + PART_BYTES) // 32) + b"end"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize("fault", [Fault.BUSY, Fault.LOST, Fault.LATE_BUSY, Fault.CUT])
async def test_large_content_survives_lost_parts_and_lost_joins(
    blobs: S3Blobs, bucket: Bucket, proxy: FaultyProxy, tmp_path: Path, method: str, fault: Fault
) -> None:
    source = tmp_path / "big"
    source.write_bytes(BIG)
    proxy.plan = parts_of(method, fault)
    uri = await blobs.put_file("datasets/big", source)
    assert await blobs.get_blob(uri) == BIG
    assert proxy.seen[fault] == 2
    listed = await blobs.keys("datasets/")
    assert [(blob.key, blob.size) for blob in listed] == [("datasets/big", len(BIG))]


def parts_of(method: str, fault: Fault) -> Callable[[Request], Fault | None]:
    """Twice, in requests that send parts (PUT) or join them (POST)."""
    plan = first(fault, fault)
    return lambda r: plan(r) if r.method == method and "uploadId" in r.target else None


@pytest.mark.slow
async def test_an_upload_that_fails_is_given_up_at_the_store_too(
    bucket: Bucket, proxy: FaultyProxy
) -> None:
    proxy.plan = lambda r: Fault.BUSY if r.method == "PUT" and "partNumber=3" in r.target else None
    blobs = S3Blobs(bucket.store(endpoint=proxy.endpoint, patience_s=0.5))
    with pytest.raises(TransientError, match="has failed every request"):
        await blobs.put_blob("large", BIG)
    assert not bucket.contents()
    assert not bucket.client.list_multipart_uploads(Bucket=bucket.name).get("Uploads")


async def test_bytes_that_changed_in_the_store_are_never_given_out(
    blobs: S3Blobs, bucket: Bucket
) -> None:
    uri = await blobs.put_blob("runs/r/x", b"content")
    metadata = bucket.client.head_object(Bucket=bucket.name, Key="runs/r/x")["Metadata"]
    bucket.client.put_object(Bucket=bucket.name, Key="runs/r/x", Body=b"c0ntent", Metadata=metadata)
    with pytest.raises(CorruptData, match="does not have the sha256 of what was written"):
        await blobs.get_blob(uri)
    bucket.client.put_object(Bucket=bucket.name, Key="runs/r/x", Body=b"foreign")
    assert await blobs.get_blob(uri) == b"foreign"
    with pytest.raises(NotFound):
        await blobs.get_blob(uri + "x")
