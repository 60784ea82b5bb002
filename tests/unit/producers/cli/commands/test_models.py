"""`headrace model deploy|undeploy|list|info|upload`: what the server is asked, and what is printed."""

from typing import Any

import pytest

from producers.cli.commands.models import model
from tests.unit.producers.cli.conftest import FakeServer, Run


def deployment(**others: Any) -> dict[str, Any]:
    return {
        "name": "sums",
        "model": "qwen:sums",
        "status": "active",
        "checkpoint": "my-run@3",
        "pending": None,
        "error": None,
        "reward": 0.75,
        "adapter_sha256": "a" * 64,
        "requested_by": "ada",
        "deployed_at": "2026-11-23T12:00:00Z",
        "usage": {"requests": 7},
        "usage_by_api_key": [
            {
                "api_key": "t1",
                "api_key_name": "ci",
                "owner": "ada",
                "requests": 7,
                "prompt_tokens": 70,
                "completion_tokens": 140,
            }
        ],
        **others,
    }


def upload(status: str, **others: Any) -> dict[str, Any]:
    made = {"id": "p1", "ref": "my-run@3", "repository": "o/sums", "status": status}
    return {**made, "waiting": None, **others}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "POLL_S", 0.0)
    monkeypatch.setattr(model, "UPLOAD_POLL_S", 0.0)


def test_deploy_waits_until_the_checkpoint_is_loaded(server: FakeServer, headrace: Run) -> None:
    loading = deployment(status="loading", pending="my-run@3", checkpoint=None)
    server.answer("POST", "/deployments", {"deployment": loading}, 201)
    server.answer("GET", "/deployments/sums", {"deployment": loading})
    server.answer("GET", "/deployments/sums", {"deployment": deployment()})
    ran = headrace("model", "deploy", "my-run@best", "--name", "sums")
    assert ran.code == 0
    assert server.requests[0].document == {"checkpoint": "my-run@best", "name": "sums"}
    assert "my-run@3 is deployed; clients call the model qwen:sums" in ran.out + ran.err
    assert len(server.requests) == 3


@pytest.mark.parametrize("pending", [None, "other@1"])
def test_deploy_fails_when_a_newer_request_takes_its_place(
    pending: str | None, server: FakeServer, headrace: Run
) -> None:
    """It said that the other checkpoint is deployed, and ended well."""
    loading = deployment(status="loading", pending="my-run@3", checkpoint=None)
    server.answer("POST", "/deployments", {"deployment": loading}, 201)
    if pending:
        server.answer("GET", "/deployments/sums", {"deployment": {**loading, "pending": pending}})
    server.answer("GET", "/deployments/sums", {"deployment": deployment(checkpoint="other@1")})
    ran = headrace("model", "deploy", "my-run@3", "--name", "sums")
    assert ran.code == 1
    assert "took the place of my-run@3: it serves other@1 now" in ran.err


def test_deploy_without_waiting_names_the_next_command(server: FakeServer, headrace: Run) -> None:
    loading = deployment(pending="my-run@3")
    server.answer("POST", "/deployments", {"deployment": loading}, 201)
    ran = headrace("model", "deploy", "my-run@3", "--no-wait")
    assert ran.code == 0
    assert server.requests[0].document == {"checkpoint": "my-run@3"}
    assert "`headrace model info sums` shows it" in ran.out + ran.err
    assert len(server.requests) == 1


def test_a_checkpoint_that_cannot_be_loaded_is_an_error(server: FakeServer, headrace: Run) -> None:
    failed = deployment(status="failed", error="it is of another base model")
    server.answer("POST", "/deployments", {"deployment": deployment(pending="my-run@3")}, 201)
    server.answer("GET", "/deployments/sums", {"deployment": failed})
    ran = headrace("model", "deploy", "my-run@3", "--json")
    assert ran.code != 0
    assert (ran.error["code"], ran.error["message"]) == ("REFUSED", "it is of another base model")


def test_undeploy_waits_until_it_is_not_served_any_more(server: FakeServer, headrace: Run) -> None:
    server.answer("DELETE", "/deployments/sums", {"deployment": deployment()})
    server.answer("GET", "/deployments/sums", {"deployment": deployment()})
    server.answer("GET", "/deployments/sums", {"deployment": deployment(status="ended")})
    ran = headrace("model", "undeploy", "sums", "--json")
    assert ran.code == 0
    assert ran.document["deployment"]["status"] == "ended"
    assert headrace("model", "undeploy", "other").code != 0


def test_list_shows_how_many_are_active(server: FakeServer, headrace: Run) -> None:
    answer = {
        "deployments": [deployment()],
        "active_deployments": 1,
        "max_active_deployments": 4,
    }
    server.answer("GET", "/deployments", answer)
    ran = headrace("model", "list")
    assert ran.code == 0
    assert "1 of 4 active" in ran.out
    assert "qwen:sums" in ran.out
    assert headrace("model", "list", "--json").document["deployments"] == [deployment()]


def test_info_shows_what_each_api_key_used(server: FakeServer, headrace: Run) -> None:
    server.answer("GET", "/deployments/sums", {"deployment": deployment()})
    ran = headrace("model", "info", "sums")
    assert ran.code == 0
    for shown in ("my-run@3", "ci", "ada", "70", "140"):
        assert shown in ran.out
    absent = headrace("model", "info", "no/such", "--json")
    assert absent.error["code"] == "NOT_FOUND"
    assert server.requests[-1].path == "/api/v1/deployments/no%2Fsuch"


def test_upload_waits_says_why_once_and_ends_with_the_address(
    server: FakeServer, headrace: Run
) -> None:
    away = upload("requested", waiting="the hub answers 503")
    uploaded = upload("uploaded", url="https://hub.example.org/o/sums", revision="r1")
    server.answer("POST", "/checkpoints/my-run@best/uploads", {"upload": upload("requested")}, 201)
    for rows in ([away], [away], [uploaded]):
        server.answer("GET", "/checkpoints/my-run@3/uploads", {"uploads": rows})
    ran = headrace("model", "upload", "my-run@best", "o/sums", "--public", "--merged")
    assert ran.code == 0, ran.err
    assert server.requests[0].document == {
        "repository": "o/sums",
        "merged": True,
        "private": False,
        "secret": "HF_TOKEN",
    }
    said = ran.out + ran.err
    assert said.count("waiting: the hub answers 503") == 1
    assert "my-run@3 is on https://hub.example.org/o/sums (revision r1)" in said


def test_an_upload_that_the_hub_refused_is_an_error(server: FakeServer, headrace: Run) -> None:
    refused = upload("failed", error="401: the token is wrong")
    server.answer("POST", "/checkpoints/my-run@3/uploads", {"upload": upload("requested")}, 201)
    server.answer("GET", "/checkpoints/my-run@3/uploads", {"uploads": [refused]})
    ran = headrace("model", "upload", "my-run@3", "o/sums", "--json")
    assert ran.code != 0
    assert ran.error["message"] == "401: the token is wrong"


def test_an_upload_that_waits_is_cancelled(server: FakeServer, headrace: Run) -> None:
    path = "/checkpoints/my-run@3/uploads"
    away, ended = upload("requested"), upload("failed", error="the upload was cancelled")
    for rows in ([ended, away], [ended]):
        server.answer("GET", path, {"uploads": rows})
    server.answer("DELETE", f"{path}/{away['id']}", {"upload": away}, 202)
    ran = headrace("model", "upload", "my-run@3", str(away["repository"]), "--cancel")
    assert ran.code == 0, ran.err
    assert "is cancelled" in ran.out + ran.err
    assert [request.method for request in server.requests] == ["GET", "DELETE", "GET"]
    server.answer("GET", path, {"uploads": [ended]})
    nothing = headrace("model", "upload", "my-run@3", str(away["repository"]), "--cancel", "--json")
    assert nothing.error["code"] == "NOT_FOUND"


def test_an_upload_without_waiting_leaves_it_to_a_worker(server: FakeServer, headrace: Run) -> None:
    server.answer("POST", "/checkpoints/my-run@3/uploads", {"upload": upload("requested")}, 201)
    arguments = ("my-run@3", "o/sums", "--no-wait", "--token-secret", "MY_TOKEN")
    ran = headrace("model", "upload", *arguments, "--json")
    assert ran.document["upload"]["status"] == "requested"
    assert server.requests[0].document["secret"] == "MY_TOKEN"
    assert len(server.requests) == 1


def test_the_old_command_works_and_is_in_no_help(server: FakeServer, headrace: Run) -> None:
    server.answer("POST", "/checkpoints/my-run@3/uploads", {"upload": upload("requested")}, 201)
    assert headrace("model", "push", "my-run@3", "o/sums", "--no-wait").code == 0
    assert "push" not in headrace("model", "--help").out


def test_models_lists_what_needs_no_server(headrace: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("producers.cli.client.BACKOFF_S", (0.0,))
    listed = headrace("models", "--json")
    assert listed.code == 0
    assert "scratch:qwen3-tiny" in {model["name"] for model in listed.document["models"]}
    families = {family["name"]: family["runs"] for family in listed.document["families"]}
    bounded = families["Gemma 3 with bounded logits"]
    assert (families["Qwen3"], bounded, families["T5"]) == ("lean", "general", "refused")
    shown = headrace("models")
    assert "scratch:qwen3-tiny" in shown.out
    assert "no Headrace server answers at http://127.0.0.1:9" in shown.err
    assert "The models in its cache are not listed" in shown.err


def test_models_shows_what_the_server_lists_or_refuses(headrace: Run, server: FakeServer) -> None:
    server.answer("GET", "/models", {"detail": "wrong key", "code": "UNAUTHORIZED"}, status=401)
    assert headrace("models").code == 1
    server.answer("GET", "/models", {"models": [{"name": "org/own", "runs": "lean"}]})
    headrace("models")
    assert "org/own" in headrace("models").out
