"""A store that cannot be used is refused at start, with a one-line error that says what to do
next."""

import json
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from infra.adapters import open_blobs
from infra.blobs.s3.client import Keys, S3Store
from infra.blobs.s3.store import S3Blobs
from infra.operations.local.free_port import free_port
from infra.ports.services import BlobExists
from infra.settings.s3 import S3Place
from infra.settings.settings import Settings
from schemas.errors import InvalidConfig, TransientError
from tests.kit.faulty_proxy import Fault, faulty_proxy
from tests.kit.s3 import Bucket, need_s3
from tests.stack.s3 import S3Server, binary, s3_server

pytestmark = pytest.mark.s3


async def refusal(bucket: Bucket, **changes: Any) -> str:
    """The reason why the bucket is refused when it is used with these changes."""
    server = replace(bucket.server, **changes)
    blobs = replace(bucket, server=server, opened=bucket.opened).blobs("p")
    with pytest.raises(InvalidConfig, match="HEADRACE_BLOBS is s3://") as raised:
        await blobs.probe()
    return one_line(raised.value.message)


def one_line(message: str) -> str:
    assert "\n" not in message
    return message


async def test_a_wrong_secret_is_refused_and_its_variable_named(bucket: Bucket) -> None:
    assert "set AWS_SECRET_ACCESS_KEY" in await refusal(bucket, secret_key="wrong")


async def test_a_wrong_access_key_is_refused_and_its_variable_named(bucket: Bucket) -> None:
    assert "set AWS_ACCESS_KEY_ID" in await refusal(bucket, access_key="nobody")


async def test_a_missing_bucket_is_named(bucket: Bucket) -> None:
    message = await refusal(replace(bucket, name="no-such-bucket"))
    assert "has no bucket no-such-bucket; create it, or name another" in message


async def test_an_address_where_nobody_answers_is_named_with_its_setting(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.blobs.s3.store.PROBE_PATIENCE_S", 0.3)
    endpoint = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(TransientError, match="correct HEADRACE_S3_ENDPOINT") as raised:
        await S3Blobs(bucket.store(endpoint=endpoint)).probe()
    assert endpoint in one_line(str(raised.value))


async def test_a_clock_that_is_an_hour_ahead_is_named(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = datetime.now(UTC).replace(tzinfo=None) + timedelta(hours=1)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda: ahead)
    assert "the clock of this machine is wrong; set it" in await refusal(bucket)


async def test_missing_credentials_are_refused_and_their_variables_named(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    settings = Settings.load(
        {
            "HEADRACE_BLOBS": f"s3://{bucket.name}",
            "HEADRACE_S3_ENDPOINT": bucket.server.endpoint,
        }
    )
    with pytest.raises(InvalidConfig, match=r"no credentials .* set AWS_ACCESS_KEY_ID"):
        async with open_blobs(settings):
            pass


async def test_the_settings_open_a_store(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.server.environment.items():
        monkeypatch.setenv(name, value)
    settings = Settings.load(
        {**bucket.server.environment, "HEADRACE_BLOBS": f"s3://{bucket.name}/a/b/"}
    )
    async with open_blobs(settings) as blobs:
        assert await blobs.put_blob("x", b"x") == f"s3://{bucket.name}/a/b/x"
    assert bucket.contents() == {"a/b/x": b"x"}


async def test_a_store_without_the_client_installed_is_named(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.adapters.importlib.util.find_spec", lambda name: None)
    settings = Settings.load({"HEADRACE_BLOBS": f"s3://{bucket.name}"})
    with pytest.raises(InvalidConfig, match=r"pip install 'headrace\[s3\]'"):
        async with open_blobs(settings):
            pass


async def test_a_store_that_overwrites_existing_objects_is_refused(bucket: Bucket) -> None:
    store = bucket.store("p")

    def unconditional(request: Any, **_: Any) -> None:
        del request.headers["If-None-Match"]

    store.client.meta.events.register("before-sign.s3.PutObject", unconditional)
    with pytest.raises(InvalidConfig, match="overwrites what it must only create"):
        await S3Blobs(store).probe()
    assert not bucket.contents()


async def test_a_store_that_does_not_know_create_only_writes(bucket: Bucket) -> None:
    with faulty_proxy(bucket.server.endpoint, lambda request: Fault.UNKNOWN) as proxy:
        blobs = S3Blobs(bucket.store(endpoint=proxy.endpoint))
        with pytest.raises(InvalidConfig, match="use one with conditional writes"):
            await blobs.probe()


class NotAStore(BaseHTTPRequestHandler):
    """A server that sends the same response to every request."""

    status = 200

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b"<html>It works!</html>"
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer  # noqa: N815 - http.server's names

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(params=[200, 204, 301, 400, 404, 412])
def web_server(request: pytest.FixtureRequest) -> Iterator[str]:
    handler = type("Handler", (NotAStore,), {"status": request.param})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


async def test_a_web_server_that_is_not_a_store_is_named(
    web_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.blobs.s3.store.PROBE_PATIENCE_S", 0.3)
    store = S3Store(S3Place("bucket"), endpoint=web_server, keys=Keys("a", "b"))
    with pytest.raises((InvalidConfig, TransientError)) as raised:
        await S3Blobs(store).probe()
    assert web_server in one_line(str(raised.value))
    store.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A store with a second account, `reader`."""
    need_s3()
    with s3_server(tmp_path_factory.mktemp("guarded"), users=True) as server:
        made = subprocess.run(
            [
                binary(),
                *("admin", "--allow-insecure", "--access", server.access_key),
                *("--secret", server.secret_key, "--endpoint-url", server.endpoint),
                *("create-user", "--access", "reader", "--secret", "secret", "--role", "user"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert made.returncode == 0, made.stdout + made.stderr
        yield server


@pytest.mark.parametrize(
    ("granted", "forbidden"),
    [
        (["GetObject", "ListBucket", "DeleteObject"], "PutObject"),
        (["PutObject", "ListBucket", "DeleteObject"], "GetObject"),
        (["PutObject", "GetObject", "DeleteObject"], "ListObjectsV2"),
        (["PutObject", "GetObject", "ListBucket"], "DeleteObject"),
    ],
)
async def test_a_bucket_in_which_something_is_not_granted(
    guarded: S3Server, granted: list[str], forbidden: str
) -> None:
    name = f"no-{forbidden.lower()}"
    owner = Keys(guarded.access_key, guarded.secret_key)
    client = S3Store(S3Place(name), endpoint=guarded.endpoint, keys=owner).client
    client.create_bucket(Bucket=name)
    statement = {
        "Effect": "Allow",
        "Principal": {"AWS": ["reader"]},
        "Action": [f"s3:{action}" for action in granted],
        "Resource": [f"arn:aws:s3:::{name}", f"arn:aws:s3:::{name}/*"],
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    client.put_bucket_policy(Bucket=name, Policy=policy)
    store = S3Store(S3Place(name), endpoint=guarded.endpoint, keys=Keys("reader", "secret"))
    with pytest.raises(InvalidConfig, match=f"forbids {forbidden} in bucket {name}; grant"):
        await S3Blobs(store).probe()
    store.close()
    left = client.list_objects_v2(Bucket=name).get("KeyCount", 0)
    assert left == (1 if forbidden == "DeleteObject" else 0)


async def test_rights_that_are_lost_in_mid_run_are_waited_for(bucket: Bucket) -> None:
    """The runtime retries after the store's refusal, because somebody may be rotating keys."""
    server = replace(bucket.server, secret_key="rotated")
    late = replace(bucket, server=server, opened=bucket.opened).blobs()
    with pytest.raises(TransientError, match="set AWS_SECRET_ACCESS_KEY"):
        await late.put_blob("x", b"x")
    with pytest.raises(TransientError):
        await late.put_blob("x", b"x", create_only=True)
    uri = await bucket.blobs().put_blob("x", b"x", create_only=True)
    with pytest.raises(BlobExists):
        await bucket.blobs().put_blob("x", b"y", create_only=True)
    with pytest.raises(TransientError):
        await late.get_blob(uri)


def test_the_built_store_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidConfig, match=r"install Go, or put versitygw v1\.8\.0 at"):
        binary()
    program = tmp_path / "headrace" / "versitygw-v1.8.0"
    program.parent.mkdir()
    program.touch()
    assert binary() == program
