"""Where user code is trusted, an installation that others reach has one workspace."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from infra.names import check_one_workspace
from infra.sandbox.service.client import SandboxClient
from infra.sandbox.service.connect import RemoteService
from infra.sandbox.service.listener import SandboxListener
from infra.settings.sandbox_service import VARIABLES
from infra.settings.settings import Settings
from schemas.artifact_refs import ArtifactRef
from schemas.errors import InvalidConfig
from tests.kit.application import Application, application
from tests.kit.sandbox_certificates import tls_context

TRUSTED = {"HEADRACE_SANDBOX": "process-trusted"}
CLUSTER = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
SERVICE = {
    "HEADRACE_SANDBOX_URL": "tcp://sandbox:8422",
    **dict.fromkeys(VARIABLES, "-----BEGIN CERTIFICATE-----"),
}


@pytest.mark.parametrize(
    ("environ", "has_one"),
    [
        (TRUSTED, False),
        (CLUSTER, False),
        (CLUSTER | {"HEADRACE_SANDBOX": "gvisor"}, False),
        (TRUSTED | CLUSTER, True),
        (TRUSTED | SERVICE, True),
        (TRUSTED | {"HEADRACE_PUBLIC_URL": "https://headrace.example.org"}, True),
        (TRUSTED | {"HEADRACE_URL": "http://0.0.0.0:8420"}, True),
    ],
)
def test_an_installation_that_trusts_and_is_shared_has_one_workspace(
    environ: Mapping[str, str], *, has_one: bool, tmp_path: Path
) -> None:
    settings = Settings.load({"HEADRACE_HOME": str(tmp_path), **environ})
    assert settings.has_one_workspace is has_one


@pytest.fixture
async def app(database_url: str, tmp_path: Path) -> AsyncIterator[Application]:
    async with application(database_url, tmp_path / "home", repositories=("/a", "/b")) as served:
        yield served


@pytest.mark.postgres
async def test_several_workspaces_keep_a_trusting_process_from_starting(
    app: Application, tmp_path: Path
) -> None:
    home = {"HEADRACE_HOME": str(tmp_path)}
    trusting = Settings.load(home | TRUSTED | CLUSTER)
    confined = Settings.load(home | CLUSTER)
    assert (await app.post("/workspaces", {"url": "/a", "name": "a"})).status_code == 201
    await check_one_workspace(app.database, trusting)
    assert (await app.post("/workspaces", {"url": "/b", "name": "b"})).status_code == 201
    await check_one_workspace(app.database, confined)
    with pytest.raises(InvalidConfig, match="there are 2 workspaces; HEADRACE_SANDBOX is"):
        await check_one_workspace(app.database, trusting)


@pytest.mark.postgres
async def test_a_trusting_installation_refuses_a_second_workspace(app: Application) -> None:
    for name, value in (("sandbox", "process-trusted"), ("in_cluster", True)):
        object.__setattr__(app.services.settings, name, value)
    for _ in range(2):
        assert (await app.post("/workspaces", {"url": "/a", "name": "a"})).status_code == 201
    refused = await app.post("/workspaces", {"url": "/b", "name": "b"})
    assert refused.status_code == 409
    assert "set HEADRACE_SANDBOX to bwrap or gvisor" in refused.json()["detail"]


@pytest.mark.parametrize(
    ("served", "wanted", "is_served"),
    [
        ("process-trusted", "bwrap", False),
        ("process-trusted", "process-trusted", True),
        ("process-trusted", None, True),
    ],
)
async def test_a_service_that_trusts_is_refused_by_clients_that_do_not(
    served: str, wanted: str | None, *, is_served: bool
) -> None:
    async def no_fetch(ref: ArtifactRef) -> bytes:
        raise AssertionError(ref)

    listener = SandboxListener("tcp://127.0.0.1:0", tls_context("service"), level=served)
    await listener.listen()
    service = RemoteService("127.0.0.1", listener.port, tls_context("client"))
    client = SandboxClient(service, fetch=no_fetch, level=wanted)
    try:
        if is_served:
            await client.start()
        else:
            with pytest.raises(InvalidConfig, match="HEADRACE_SANDBOX of this process names"):
                await client.start()
    finally:
        await client.aclose()
        await listener.aclose()
