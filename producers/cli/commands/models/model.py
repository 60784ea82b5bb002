"""`headrace model`: checkpoints behind an OpenAI-compatible endpoint, and on a model hub."""

import time

import click

from producers.cli.client import Client, path_segment
from producers.cli.command_tree import command, group
from producers.cli.display.output import (
    Document,
    print_fields,
    print_json,
    print_table,
    say,
    time_ago,
)
from producers.cli.errors import Failure

POLL_S = 0.1
LOADING_S = 1800.0
PUSH_POLL_S, PUSHING_S = 0.5, 6 * 3600.0
CANCELLING_S = 30.0

model = group("model", "Trained models: deploy, undeploy, list, info, push.")

NAME = click.argument("name", metavar="NAME")


@command(model, "deploy", example="headrace model deploy my-run@best --name sums")
@click.argument("ref", metavar="REF")
@click.option("--name", help="Name of the deployment. Default: the name of the run.")
@click.option("--no-wait", is_flag=True, help="Do not wait until the checkpoint is loaded.")
def deploy(ref: str, *, name: str | None, no_wait: bool, as_json: bool) -> None:
    """Serve a LoRA checkpoint to clients of OpenAI's API.

    REF is RUN@STEP, RUN@last or RUN@best. Clients call the model BASE:NAME at /v1/chat/completions or
    /v1/completions, with a token of the scope inference. If the name is in use, its old version
    answers until the new one is loaded.
    """
    with Client() as client:
        body = {"checkpoint": ref, **({"name": name} if name else {})}
        found: Document = client.post("/deployments", body)["deployment"]
        if not no_wait:
            found = _wait_until_loaded(client, found)
    if as_json:
        print_json({"deployment": found})
    elif found.get("pending"):
        say(f"{found['pending']} is being loaded; `headrace model info {found['name']}` shows it")
    else:
        say(f"{found['checkpoint']} is deployed; clients call the model {found['model']}")


def _wait_until_loaded(client: Client, found: Document) -> Document:
    """The deployment once nothing is being loaded. Raises Failure when it cannot be loaded."""
    until = time.monotonic() + LOADING_S
    while found.get("pending") and time.monotonic() < until:
        time.sleep(POLL_S)
        found = client.get(f"/deployments/{path_segment(str(found['name']))}")["deployment"]
    if found.get("error"):
        raise Failure("REFUSED", str(found["error"]))
    return found


@command(model, "undeploy", example="headrace model undeploy sums")
@NAME
def undeploy(name: str, *, as_json: bool) -> None:
    """End a deployment. Requests that are being answered are still answered."""
    with Client() as client:
        client.delete(f"/deployments/{path_segment(name)}")
        found: Document = client.get(f"/deployments/{path_segment(name)}")["deployment"]
        until = time.monotonic() + LOADING_S
        while found.get("status") in ("active", "loading") and time.monotonic() < until:
            time.sleep(POLL_S)
            found = client.get(f"/deployments/{path_segment(name)}")["deployment"]
    if as_json:
        print_json({"deployment": found})
    else:
        say(f"{name} is not deployed any more")


@command(model, "list", example="headrace model list")
def list_(*, as_json: bool) -> None:
    """List deployments, the active ones first."""
    with Client() as client:
        answer = client.get("/deployments")
    if as_json:
        print_json(answer)
        return
    rows = [
        (
            d.get("name"),
            d.get("model"),
            d.get("status"),
            d.get("pending") or d.get("checkpoint"),
            d.get("reward"),
            d["usage"].get("requests"),
            time_ago(d.get("deployed_at")),
        )
        for d in answer["deployments"]
    ]
    counts = f"{answer['active_deployments']} of {answer['max_active_deployments']} active"
    columns = ("name", "model", "status", "checkpoint", "reward", "requests", "deployed")
    print_table(f"Deployments ({counts})", columns, rows)


@command(model, "info", example="headrace model info sums")
@NAME
def info(name: str, *, as_json: bool) -> None:
    """Show a deployment: its checkpoint, and what each token used."""
    with Client() as client:
        answer = client.get(f"/deployments/{path_segment(name)}")
    if as_json:
        print_json(answer)
        return
    found: Document = answer["deployment"]
    keys = (
        "name",
        "model",
        "status",
        "checkpoint",
        "pending",
        "error",
        "reward",
        "adapter_sha256",
        "requested_by",
        "deployed_at",
    )
    print_fields(f"Deployment {name}", [(key, found.get(key)) for key in keys])
    rows = [
        (
            used.get("token_name") or used.get("token"),
            used.get("owner"),
            used.get("requests"),
            used.get("prompt_tokens"),
            used.get("completion_tokens"),
        )
        for used in found["usage_by_token"]
    ]
    columns = ("token", "owner", "requests", "prompt tokens", "completion tokens")
    print_table("Use", columns, rows)


@command(model, "push", example="headrace model push my-run@best my-org/sums-lora")
@click.argument("ref", metavar="REF")
@click.argument("repository", metavar="ORG/NAME")
@click.option("--merged", is_flag=True, help="Upload the base model with the adapter added.")
@click.option(
    "--private/--public", default=True, show_default=True, help="Who can see the repository."
)
@click.option(
    "--token-secret",
    metavar="NAME",
    default="HF_TOKEN",
    show_default=True,
    help="Secret that holds the token of the hub.",
)
@click.option("--no-wait", is_flag=True, help="Do not wait until the checkpoint is uploaded.")
@click.option("--cancel", is_flag=True, help="Give up the push of REF to ORG/NAME that is waiting.")
def push(
    ref: str,
    repository: str,
    *,
    merged: bool,
    private: bool,
    token_secret: str,
    no_wait: bool,
    cancel: bool,
    as_json: bool,
) -> None:
    """Upload a checkpoint to a model hub, with a model card.

    A worker uploads it, so this command may be interrupted. Store the token of the hub first: headrace
    secret set HF_TOKEN. A repository that Headrace made before gets a new commit.
    """
    body = {
        "repository": repository,
        "merged": merged,
        "private": private,
        "secret": token_secret,
    }
    with Client() as client:
        if cancel:
            found = _cancel_push(client, ref, repository)
        else:
            found = client.post(f"/checkpoints/{path_segment(ref)}/pushes", body)["push"]
            found = found if no_wait else _wait_until_pushed(client, found)
    if as_json:
        print_json({"push": found})
    elif cancel and found.get("status") != "pushed":
        how = "is cancelled" if found.get("status") == "failed" else "will be cancelled"
        say(f"the push of {found['ref']} to {repository} {how}")
    elif found.get("status") == "pushed":
        say(f"{found['ref']} is on {found['url']} (revision {found['revision']})")
    else:
        say(f"{found['ref']} is being uploaded; `headrace checkpoint list RUN` shows it")


def _cancel_push(client: Client, ref: str, repository: str) -> Document:
    """The newest push of a checkpoint to a repository once it has ended. Raises Failure when none is
    waiting."""
    pushes = f"/checkpoints/{path_segment(ref)}/pushes"
    waiting: list[Document] = [
        row
        for row in client.get(pushes)["pushes"]
        if (row["status"], row["repository"]) == ("requested", repository)
    ]
    if not waiting:
        raise Failure("NOT_FOUND", f"no push of {ref} to {repository} is waiting")
    found: Document = client.delete(f"{pushes}/{path_segment(str(waiting[0]['id']))}")["push"]
    until = time.monotonic() + CANCELLING_S
    while found.get("status") == "requested" and time.monotonic() < until:
        time.sleep(POLL_S)
        rows = client.get(pushes)["pushes"]
        found = next((row for row in rows if row["id"] == found["id"]), found)
    return found


def _wait_until_pushed(client: Client, found: Document) -> Document:
    """The push once it has ended. Raises Failure when the hub does not have the checkpoint."""
    until, said = time.monotonic() + PUSHING_S, None
    while found.get("status") in (None, "requested") and time.monotonic() < until:
        time.sleep(PUSH_POLL_S)
        rows = client.get(f"/checkpoints/{path_segment(str(found['ref']))}/pushes")["pushes"]
        found = next((row for row in rows if row["id"] == found["id"]), found)
        waiting = found.get("waiting")
        if waiting and waiting != said:
            said = waiting
            say(f"waiting: {waiting}")
    if found.get("status") == "failed":
        raise Failure("REFUSED", str(found.get("error")))
    return found
