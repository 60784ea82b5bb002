"""Each service of a cluster has an account at the S3 store, which may do what the service does and no
more."""

import asyncio
from collections.abc import Iterator

import pytest
from botocore.exceptions import ClientError

from consumers.process.accounts import consumed_types
from infra.blobs.s3.accounts import access_key_of, make_s3_accounts
from infra.blobs.s3.client import Keys, S3Store
from infra.blobs.s3.store import S3Blobs
from infra.settings.s3 import S3Place
from schemas.errors import InvalidConfig
from tests.kit.s3 import need_s3
from tests.stack.components import BUCKET, make_bucket
from tests.stack.s3 import S3Server, s3_server

pytestmark = pytest.mark.s3

SERVICES = tuple(consumed_types())
SECRETS = {service: f"{service}x7Kq".ljust(24, "0") for service in SERVICES}
PLACE = S3Place(BUCKET, "blobs")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    need_s3()
    with s3_server(tmp_path_factory.mktemp("accounts"), users=True) as made:
        make_bucket(made)
        make(made, SECRETS)
        yield made


def make(server: S3Server, accounts: dict[str, str]) -> None:
    admin = Keys(server.access_key, server.secret_key)
    asyncio.run(make_s3_accounts(PLACE, endpoint=server.endpoint, admin=admin, accounts=accounts))


def store_of(server: S3Server, service: str, secret: str | None = None) -> S3Store:
    keys = Keys(access_key_of(service), secret or SECRETS[service])
    return S3Store(PLACE, endpoint=server.endpoint, keys=keys)


def test_each_service_can_do_its_work(server: S3Server) -> None:
    for service in SERVICES:
        store = store_of(server, service)
        asyncio.run(S3Blobs(store).probe())
        store.close()


@pytest.mark.parametrize("service", SERVICES)
def test_no_service_touches_the_bucket_or_what_is_beside_its_objects(
    server: S3Server, service: str
) -> None:
    store = store_of(server, service)
    for call, arguments in (
        ("delete_bucket", {}),
        ("put_bucket_policy", {"Policy": "{}"}),
        ("delete_bucket_policy", {}),
        ("put_object", {"Key": "elsewhere/x", "Body": b"x"}),
        ("get_object", {"Key": "elsewhere/x"}),
    ):
        with pytest.raises(ClientError) as refused:
            getattr(store.client, call)(Bucket=BUCKET, **arguments)
        assert refused.value.response["Error"]["Code"] == "AccessDenied", call
    store.close()


def test_only_those_that_retire_objects_delete_them(server: S3Server) -> None:
    api = store_of(server, "api")
    for service in set(SERVICES) - {"api", "learn"}:
        store = store_of(server, service)
        store.client.put_object(Bucket=BUCKET, Key="blobs/runs/r/objects/x", Body=b"x")
        with pytest.raises(ClientError, match="AccessDenied"):
            store.client.delete_object(Bucket=BUCKET, Key="blobs/runs/r/objects/x")
        store.close()
    learn = store_of(server, "learn")
    learn.client.delete_object(Bucket=BUCKET, Key="blobs/runs/r/objects/x")
    api.client.put_object(Bucket=BUCKET, Key="blobs/runs/r/ckpt/1/MANIFEST.json", Body=b"x")
    with pytest.raises(ClientError, match="AccessDenied"):
        learn.client.delete_object(Bucket=BUCKET, Key="blobs/runs/r/ckpt/1/MANIFEST.json")
    api.client.delete_object(Bucket=BUCKET, Key="blobs/runs/r/ckpt/1/MANIFEST.json")
    for store in (api, learn):
        store.close()


def test_a_new_secret_replaces_the_old_one(server: S3Server) -> None:
    make(server, {**SECRETS, "grade": "another0another0"})
    for secret, is_valid in ((SECRETS["grade"], False), ("another0another0", True)):
        store = store_of(server, "grade", secret)
        if is_valid:
            asyncio.run(S3Blobs(store).probe())
        else:
            with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
                store.client.list_objects_v2(Bucket=BUCKET, Prefix="blobs/")
        store.close()
    make(server, SECRETS)


def test_a_service_makes_no_accounts(server: S3Server) -> None:
    admin = Keys(access_key_of("learn"), SECRETS["learn"])
    with pytest.raises(InvalidConfig, match="name the keys of its administrator"):
        asyncio.run(
            make_s3_accounts(PLACE, endpoint=server.endpoint, admin=admin, accounts=SECRETS)
        )
