"""Uploads to a hub with the hub's real client: what it commits, refuses and repeats, and what a kill in
the middle of an upload leaves."""

import asyncio
import hashlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from infra.blobs.hub.uploads import HubUploads, check_endpoint
from infra.ports.hub import PreparedUpload
from infra.spine.runtime.attempt import pause_after
from schemas.errors import HubAway, InvalidConfig, Refused
from schemas.secrets.secret_value import SecretValue
from tests.kit.model_hub import CHUNK, TOKEN, Hub, HubFault, model_hub

SMALL, LARGE = b"small weights", bytes(range(256)) * (CHUNK // 256) * 3 + b"end"
CARD = "---\nlibrary_name: peft\n---\n# a model\n"
DEADLINE_S = 60.0


@pytest.fixture
def hub() -> Iterator[Hub]:
    with model_hub() as running:
        yield running
        assert running.problems == []


@pytest.fixture
def wanted(tmp_path: Path) -> PreparedUpload:
    """An upload with a small file and one of several parts."""
    directory = tmp_path / "model"
    (directory / "base").mkdir(parents=True)
    (directory / "adapter_model.safetensors").write_bytes(LARGE)
    (directory / "base" / "model.safetensors").write_bytes(SMALL)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "README.md").write_text(CARD)
    (directory / "headrace.json").write_text("{}")
    return PreparedUpload(
        id="p1", directory=directory, repository="org/sums", private=True, title="Upload run@3"
    )


def oid(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def test_an_upload_is_one_private_commit_with_the_same_bytes(
    hub: Hub, wanted: PreparedUpload
) -> None:
    made = await HubUploads(hub.url).upload(wanted, SecretValue(TOKEN))
    repository = hub.repositories["org/sums"]
    assert repository.private
    assert made.url == f"{hub.url}/org/sums"
    assert [commit["id"] for commit in hub.commits_of("org/sums")] == [made.revision]
    files = {
        path.relative_to(wanted.directory).as_posix(): path.read_bytes()
        for path in wanted.directory.rglob("*")
        if path.is_file()
    }
    assert {k: v for k, v in repository.files.items() if k != ".gitattributes"} == files
    assert hub.uploads(oid(LARGE)) == 4, "in parts"


async def test_the_same_upload_again_finds_its_commit(hub: Hub, wanted: PreparedUpload) -> None:
    uploads = HubUploads(hub.url)
    first = await uploads.upload(wanted, SecretValue(TOKEN))
    assert await uploads.upload(wanted, SecretValue(TOKEN)) == first
    assert len(hub.commits_of("org/sums")) == 1


async def test_the_commit_of_an_earlier_release_is_found(hub: Hub, wanted: PreparedUpload) -> None:
    """A worker of that release began the upload, and died."""
    uploads = HubUploads(hub.url)
    first = await uploads.upload(wanted, SecretValue(TOKEN))
    [commit] = hub.commits_of("org/sums")
    assert commit["message"] == "Headrace-Upload: p1"
    commit["message"] = "Headrace-Push: p1"
    assert await uploads.upload(wanted, SecretValue(TOKEN)) == first
    assert len(hub.commits_of("org/sums")) == 1


async def test_another_upload_is_another_commit_and_uploads_only_what_is_new(
    hub: Hub, wanted: PreparedUpload
) -> None:
    uploads = HubUploads(hub.url)
    await uploads.upload(wanted, SecretValue(TOKEN))
    (wanted.directory / "base" / "model.safetensors").unlink()
    (wanted.directory / "headrace.json").write_text('{"upload": "p2"}')
    await uploads.upload(replace(wanted, id="p2"), SecretValue(TOKEN))
    assert len(hub.commits_of("org/sums")) == 2
    assert hub.uploads(oid(LARGE)) == 4
    assert "base/model.safetensors" not in hub.repositories["org/sums"].files


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (HubFault("POST", "/batch$", 403, "storage quota exceeded"), "storage quota exceeded"),
        (HubFault("PUT", "/storage/", 403, "AccessDenied"), "write access"),
        (HubFault("POST", "/commit/main$", 400, "bad card"), "bad card"),
        (HubFault("POST", "/repos/create$", 402, "pay first"), "another plan"),
        (HubFault("PUT", "/storage/", 507, "disk full"), "more storage"),
    ],
)
async def test_a_hub_that_refuses_in_mid_upload_says_why(
    hub: Hub, wanted: PreparedUpload, fault: HubFault, words: str
) -> None:
    hub.faults.append(fault)
    if "create" in fault.path:
        hub.faults.append(HubFault("GET", "/api/models/", 404, "none"))
    with pytest.raises(Refused, match=words) as refused:
        await HubUploads(hub.url).upload(wanted, SecretValue(TOKEN))
    assert not isinstance(refused.value, InvalidConfig)
    assert TOKEN not in refused.value.message
    assert "org/sums" not in hub.repositories or hub.commits_of("org/sums") == []


async def test_a_wrong_token_and_a_foreign_namespace_are_refused(
    hub: Hub, wanted: PreparedUpload
) -> None:
    with pytest.raises(Refused, match="headrace secret set HF_TOKEN"):
        await HubUploads(hub.url).upload(wanted, SecretValue("hf_wrong-token-1"))
    with pytest.raises(Refused, match="no rights to create"):
        await HubUploads(hub.url).upload(
            replace(wanted, repository="others/sums"), SecretValue(TOKEN)
        )


async def test_a_name_that_is_taken_or_of_another_visibility_is_refused(
    hub: Hub, wanted: PreparedUpload
) -> None:
    uploads = HubUploads(hub.url)
    await uploads.upload(wanted, SecretValue(TOKEN))
    public = replace(wanted, id="p2", private=False)
    with pytest.raises(Refused, match="exists and is private"):
        await uploads.upload(public, SecretValue(TOKEN))
    del hub.repositories["org/sums"].files["headrace.json"]
    with pytest.raises(Refused, match="not made by Headrace"):
        await uploads.upload(replace(wanted, id="p3"), SecretValue(TOKEN))
    assert len(hub.commits_of("org/sums")) == 1


async def test_a_rate_limit_waits_for_as_long_as_the_hub_says(
    hub: Hub, wanted: PreparedUpload
) -> None:
    hub.faults.append(
        HubFault("POST", "/repos/create$", 429, "slow down", {"Retry-After": "77"}, times=9)
    )
    with pytest.raises(HubAway, match="slow down") as away:
        await HubUploads(hub.url).upload(wanted, SecretValue(TOKEN))
    assert away.value.pause_s / 2 == 77, "at least half of a pause is waited"
    assert away.value.longest_pause_s is None


async def test_a_hub_that_is_away_is_asked_again(wanted: PreparedUpload) -> None:
    with pytest.raises(HubAway, match="does not answer") as away:
        await HubUploads("http://127.0.0.1:9").upload(wanted, SecretValue(TOKEN))
    pauses = [pause_after(away.value, tries) for tries in (1, 2, 3, 50)]
    assert pauses == [15, 30, 60, 900]


async def test_an_error_of_the_storage_is_repeated_by_the_client(
    hub: Hub, wanted: PreparedUpload
) -> None:
    hub.faults.append(HubFault("PUT", "/storage/", 500, "try again"))
    await HubUploads(hub.url).upload(wanted, SecretValue(TOKEN))
    assert len(hub.commits_of("org/sums")) == 1


async def test_a_commit_whose_answer_was_lost_is_found(hub: Hub, wanted: PreparedUpload) -> None:
    hub.faults.append(HubFault("POST", "/commit/main$", 502, "lost", after=True))
    uploads = HubUploads(hub.url)
    with pytest.raises(HubAway):
        await uploads.upload(wanted, SecretValue(TOKEN))
    found = await uploads.upload(wanted, SecretValue(TOKEN))
    assert [commit["id"] for commit in hub.commits_of("org/sums")] == [found.revision]


@pytest.mark.processes
@pytest.mark.parametrize("where", ["/storage/[0-9a-f]+/2$", "/commit/main$"])
async def test_a_killed_upload_goes_on_where_it_was(
    hub: Hub, wanted: PreparedUpload, where: str
) -> None:
    """The attempt is killed while the hub has a request in its hands. What is on the hub already is not
    uploaded again, and there is one commit."""
    held, release = threading.Event(), threading.Event()

    def before(method: str, path: str) -> None:
        if method in ("PUT", "POST") and re.search(where, path) and not held.is_set():
            held.set()
            release.wait(DEADLINE_S)

    hub.before = before
    uploads = HubUploads(hub.url)
    attempt = asyncio.ensure_future(uploads.upload(wanted, SecretValue(TOKEN)))
    assert await asyncio.to_thread(held.wait, DEADLINE_S)
    attempt.cancel()  # kills the program, as the end of its worker does
    with pytest.raises(asyncio.CancelledError):
        await attempt
    release.set()
    before_again = hub.uploads(oid(SMALL))
    found = await uploads.upload(wanted, SecretValue(TOKEN))
    assert [commit["id"] for commit in hub.commits_of("org/sums")] == [found.revision]
    if where.startswith("/commit"):
        assert hub.uploads(oid(SMALL)) == before_again == 1
        assert hub.uploads(oid(LARGE)) == 4


async def test_the_program_dials_no_private_address_that_the_hub_names(
    hub: Hub, wanted: PreparedUpload
) -> None:
    """A hub on this machine may name this machine, and no address of a private network."""
    hub.faults.append(
        HubFault("POST", "/repos/create$", 307, "", {"Location": "http://10.1.2.3:9/x"})
    )
    with pytest.raises(Refused, match="not public"):
        await HubUploads(hub.url).upload(wanted, SecretValue(TOKEN))


@pytest.mark.parametrize(
    "endpoint",
    ["http://hub.example.com", "ftp://a", "https://user:key@hub.example.com", "", "file:///etc"],
)
def test_no_token_is_sent_to_such_an_address(endpoint: str) -> None:
    with pytest.raises(InvalidConfig, match="HF_ENDPOINT"):
        check_endpoint(endpoint)


def test_https_and_loopback_addresses_of_hubs_are_accepted() -> None:
    for endpoint in ("https://huggingface.co", "http://127.0.0.1:8000", "http://localhost:1"):
        check_endpoint(endpoint)


WORKER = """
import asyncio, sys
from pathlib import Path
from infra.blobs.hub.uploads import HubUploads
from infra.ports.hub import PreparedUpload
from schemas.secrets.secret_value import SecretValue

hub, directory, token = sys.argv[1], Path(sys.argv[2]), sys.stdin.readline().strip()
wanted = PreparedUpload("p1", directory, "org/sums", True, "Upload run@3")
asyncio.run(HubUploads(hub).upload(wanted, SecretValue(token)))
"""


@pytest.mark.processes
async def test_an_upload_ends_with_its_killed_worker_and_another_one_finishes_it(
    hub: Hub, wanted: PreparedUpload
) -> None:
    held, release = threading.Event(), threading.Event()

    def before(method: str, path: str) -> None:
        if method == "PUT" and path.endswith("/3") and not held.is_set():
            held.set()
            release.wait(DEADLINE_S)

    hub.before = before
    worker = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        WORKER,
        hub.url,
        str(wanted.directory),
        stdin=asyncio.subprocess.PIPE,
    )
    assert worker.stdin is not None
    worker.stdin.write(TOKEN.encode() + b"\n")
    assert await asyncio.to_thread(held.wait, DEADLINE_S)
    [program] = psutil.Process(worker.pid).children()
    assert TOKEN not in " ".join(program.cmdline())
    assert TOKEN not in str(program.environ())
    worker.kill()
    await worker.wait()
    await asyncio.to_thread(program.wait, DEADLINE_S)  # nobody killed it: its input was closed
    release.set()
    assert hub.commits_of("org/sums") == []
    small = hub.uploads(oid(SMALL))
    found = await HubUploads(hub.url).upload(wanted, SecretValue(TOKEN))
    assert [commit["id"] for commit in hub.commits_of("org/sums")] == [found.revision]
    assert hub.uploads(oid(SMALL)) == small == 1, "it was on the hub already"


@pytest.mark.parametrize("check", [True, False])
def test_twin_without_the_check_a_private_address_is_dialled(*, check: bool) -> None:
    """The check is a hook of the whole process, so each case has a process of its own. Without the check
    the connection is tried, and ends by its deadline or as the network decides."""
    script = f"""
import socket
from infra.blobs.hub.upload_program import only_dial_checked_addresses
if {check}:
    only_dial_checked_addresses("http://127.0.0.1:9")
try:
    socket.create_connection(("10.1.2.3", 9), timeout=0.05)
except Exception as error:
    print(type(error).__name__)
"""
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert (said == "UploadRefused") == check, said
