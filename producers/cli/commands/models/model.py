"""`headrace models`: the models that a run can start from. `headrace model`: models from packages, and
checkpoints behind an OpenAI-compatible endpoint and on a model hub."""

import time

import click

from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.command_tree import group
from producers.cli.commands.models.fetch import fetch
from producers.cli.display.output import (
    Document,
    Output,
    Part,
    fields,
    note,
    say,
    table,
    time_ago,
)
from producers.cli.errors import Failure

POLL_S = 0.1
LOADING_S = 1800.0
UPLOAD_POLL_S, UPLOADING_S = 0.5, 6 * 3600.0
CANCELLING_S = 30.0

model = group(
    "model",
    "Models: fetch one to train from; deploy, undeploy, list, info and upload trained ones.",
    old_names={"push": "upload"},
)
model.add_command(fetch)

NAME = click.argument("name", metavar="NAME")


@command(model, "deploy", example="headrace model deploy my-run@best --name sums")
@click.argument("ref", metavar="REF")
@click.option("--name", help="Name of the deployment. Default: the name of the run.")
@click.option("--no-wait", is_flag=True, help="Do not wait until the checkpoint is loaded.")
def deploy(client: Client, ref: str, *, name: str | None, no_wait: bool) -> Output:
    """Serve a LoRA checkpoint to clients of OpenAI's API.

    REF is RUN@STEP, RUN@last, RUN@best, or RUN-step-N, which also names the deployment. Clients call
    the model BASE:NAME at /v1/chat/completions or /v1/completions, with an API key of the scope
    inference. A name is unique in its workspace: with an API key of several workspaces that have it,
    they call BASE:WORKSPACE/NAME. If the name is in use, its old version answers until the new one is
    loaded.
    """
    body = {"checkpoint": ref, **({"name": name} if name else {})}
    found: Document = client.post("/deployments", body)["deployment"]
    if not no_wait:
        found = _wait_until_loaded(client, found)
    said = f"{found.get('checkpoint')} is deployed; clients call the model {found.get('model')}"
    if found.get("pending"):
        said = f"{found['pending']} is being loaded; `headrace model info {_name(found)}` shows it"
    return Output({"deployment": found}, said)


def _wait_until_loaded(client: Client, found: Document) -> Document:
    """The deployment once nothing is being loaded. Raises Failure when it cannot be loaded, or when a
    newer request took its place."""
    until, wanted = time.monotonic() + LOADING_S, found.get("pending") or found.get("checkpoint")
    while found.get("pending") and time.monotonic() < until:
        time.sleep(POLL_S)
        found = client.get(f"/deployments/{path_segment(_name(found))}")["deployment"]
    if found.get("error"):
        raise Failure("REFUSED", str(found["error"]))
    if wanted not in (found.get("pending"), found.get("checkpoint")):
        now = found.get("pending") or found.get("checkpoint")
        message = (
            f"a newer request for {found['name']} took the place of {wanted}: it serves {now} now"
        )
        raise Failure("REFUSED", f"{message}; `headrace model info {_name(found)}` shows it")
    return found


def _name(found: Document) -> str:
    """The name of a deployment that means it alone. Servers of earlier releases give none with a
    workspace."""
    return str(found.get("ref") or found["name"])


@command(model, "undeploy", example="headrace model undeploy sums")
@NAME
def undeploy(client: Client, name: str) -> Output:
    """End a deployment. Requests that are being answered are still answered.

    NAME is the name of the deployment, or of its checkpoint: RUN-step-N. WORKSPACE/NAME names the
    deployment of one workspace, if several have the name.
    """
    found: Document = client.delete(f"/deployments/{path_segment(name)}")["deployment"]
    name = _name(found)
    until = time.monotonic() + LOADING_S
    while found.get("status") in ("active", "loading") and time.monotonic() < until:
        time.sleep(POLL_S)
        found = client.get(f"/deployments/{path_segment(name)}")["deployment"]
    return Output({"deployment": found}, f"{found['name']} is not deployed any more")


@command(model, "list", example="headrace model list")
def list_(client: Client) -> Output:
    """List deployments, the active ones first."""
    answer = client.get("/deployments")
    rows = [
        (
            d.get("name"),
            d.get("workspace_name") or d.get("workspace"),
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
    columns = (
        "name",
        "workspace",
        "model",
        "status",
        "checkpoint",
        "reward",
        "requests",
        "deployed",
    )
    return Output(answer, table(f"Deployments ({counts})", columns, rows))


@command(model, "info", example="headrace model info sums")
@NAME
def info(client: Client, name: str) -> Output:
    """Show a deployment: its checkpoint, and what each API key used."""
    answer = client.get(f"/deployments/{path_segment(name)}")
    found: Document = answer["deployment"]
    keys = (
        "name",
        "workspace",
        "workspace_name",
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
    rows = [
        (
            used.get("api_key_name") or used.get("api_key"),
            used.get("owner"),
            used.get("requests"),
            used.get("prompt_tokens"),
            used.get("completion_tokens"),
        )
        for used in found["usage_by_api_key"]
    ]
    columns = ("API key", "owner", "requests", "prompt tokens", "completion tokens")
    return Output(
        answer,
        fields(f"Deployment {name}", [(key, found.get(key)) for key in keys]),
        table("Use", columns, rows),
    )


@command(model, "upload", example="headrace model upload my-run@best my-org/sums-lora")
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
@click.option(
    "--cancel", is_flag=True, help="Give up the upload of REF to ORG/NAME that is waiting."
)
def upload(
    client: Client,
    ref: str,
    repository: str,
    *,
    merged: bool,
    private: bool,
    token_secret: str,
    no_wait: bool,
    cancel: bool,
) -> Output:
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
    if cancel:
        found = _cancel_upload(client, ref, repository)
    else:
        found = client.post(f"/checkpoints/{path_segment(ref)}/uploads", body)["upload"]
        found = found if no_wait else _wait_until_uploaded(client, found)
    said = f"{found['ref']} is being uploaded; `headrace checkpoint list RUN` shows it"
    if found.get("status") == "uploaded":
        said = f"{found['ref']} is on {found['url']} (revision {found['revision']})"
    elif cancel:
        how = "is cancelled" if found.get("status") == "failed" else "will be cancelled"
        said = f"the upload of {found['ref']} to {repository} {how}"
    return Output({"upload": found}, said)


def _cancel_upload(client: Client, ref: str, repository: str) -> Document:
    """The newest upload of a checkpoint to a repository once it has ended. Raises Failure when none is
    waiting."""
    uploads = f"/checkpoints/{path_segment(ref)}/uploads"
    waiting: list[Document] = [
        row
        for row in client.get(uploads)["uploads"]
        if (row["status"], row["repository"]) == ("requested", repository)
    ]
    if not waiting:
        raise Failure("NOT_FOUND", f"no upload of {ref} to {repository} is waiting")
    found: Document = client.delete(f"{uploads}/{path_segment(str(waiting[0]['id']))}")["upload"]
    until = time.monotonic() + CANCELLING_S
    while found.get("status") == "requested" and time.monotonic() < until:
        time.sleep(POLL_S)
        rows = client.get(uploads)["uploads"]
        found = next((row for row in rows if row["id"] == found["id"]), found)
    return found


def _wait_until_uploaded(client: Client, found: Document) -> Document:
    """The upload once it has ended. Raises Failure when the hub does not have the checkpoint."""
    until, said = time.monotonic() + UPLOADING_S, None
    while found.get("status") in (None, "requested") and time.monotonic() < until:
        time.sleep(UPLOAD_POLL_S)
        rows = client.get(f"/checkpoints/{path_segment(str(found['ref']))}/uploads")["uploads"]
        found = next((row for row in rows if row["id"] == found["id"]), found)
        waiting = found.get("waiting")
        if waiting and waiting != said:
            said = waiting
            say(f"waiting: {waiting}")
    if found.get("status") == "failed":
        raise Failure("REFUSED", str(found.get("error")))
    return found


@command(None, "models", example="headrace models --json")
def models(client: Client) -> Output:
    """List base models and scratch: models, which are made from a seed without a download.

    experiment.model_path also accepts any hub id, a local directory or .gguf file, or a checkpoint:
    RUN@STEP, RUN@last or RUN@best. The second table says of each family whether the lean decoder runs
    it, or Transformers' own module (general), and why. Without a server, the models in its cache
    are left out.
    """
    answer, missing = _known_models(client)
    kept = ("name", "kind", "parameters", "runs", "why")
    rows = [tuple(m.get(key) for key in kept) for m in answer["models"]]
    of_family = ("name", "model_type", "runs", "why")
    families = [tuple(f.get(key) for key in of_family) for f in answer.get("families", ())]
    return Output(
        answer, table("Models", kept, rows), table("Families", of_family, families), missing
    )


def _known_models(client: Client) -> tuple[Document, Part]:
    """The models that the server lists. If none answers, those that are the same everywhere, and a note
    that says so."""
    try:
        return client.get("/models"), None
    except Failure as failure:
        if failure.code != "UNREACHABLE":
            raise
        from schemas.models.families import describe_families
        from schemas.models.scratch import describe_shapes

        known: Document = {"models": describe_shapes(), "families": describe_families()}
        return known, note(f"{failure.message}. The models in its cache are not listed")
