"""`headrace workspace connect`, `disconnect`, `rotate-secret`: the webhook on a forge and its secret."""

import os
from collections.abc import Iterator
from pathlib import Path

import click

from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.display.output import Document, Output
from producers.cli.errors import Failure
from producers.cli.repository import address_of

FORGES = click.Choice(["github", "gitea", "gitlab", "none"])
MOST_KEY_BYTES = 64 << 10

KEY_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)

STEPS = {
    "github": (
        "on GitHub, open the repository's Settings > Webhooks > Add webhook",
        "enter the address as Payload URL, the secret as Secret, and application/json as Content type",
        "keep `Just the push event`, and save",
    ),
    "gitea": (
        "on the forge, open the repository's Settings > Webhooks > Add Webhook > Gitea (or Forgejo)",
        "enter the address as Target URL, POST, application/json, and the secret as Secret",
        "choose `Push`, `Create` and `Delete` as events, and save",
    ),
    "gitlab": (
        "on GitLab, open the project's Settings > Webhooks > Add new webhook",
        "enter the address as URL, and the secret as Secret token",
        "choose `Push events` and `Tag push events`, and save",
    ),
    "none": (
        "let a hook of the repository (for example hooks/post-receive) send a POST after each push",
        "its body is GitHub's JSON of a push, with the header `X-GitHub-Event: push`",
        "the header X-Hub-Signature-256 is `sha256=` and the body's HMAC-SHA256 with the secret",
    ),
}
"""The steps by which a person enters the webhook, for each kind of forge."""


@command(None, "connect", example="headrace workspace connect https://github.com/o/r --token-env T")
@click.argument("url", metavar="URL")
@click.option("--name", help="Name of the workspace. Default: the last part of its path or URL.")
@click.option("--forge", type=FORGES, help="The kind of forge. Default: by the URL's host.")
@click.option("--provider", "old_forge", type=FORGES, hidden=True, help="The old name of --forge.")
@click.option("--token-env", metavar="VAR", help="Environment variable that holds a token.")
@click.option("--deploy-key-file", type=KEY_FILE, help="Private half of a deploy key.")
@click.option("--app-id", metavar="ID", help="Number of a GitHub App.")
@click.option("--app-key-file", type=KEY_FILE, help="Private key of that GitHub App.")
def connect(
    client: Client,
    url: str,
    *,
    name: str | None,
    forge: str | None,
    old_forge: str | None,
    token_env: str | None,
    deploy_key_file: Path | None,
    app_id: str | None,
    app_key_file: Path | None,
) -> Output:
    """Let pushes to a repository start runs.

    URL may also be a path or the name of a workspace. With a token or an App, the webhook is made
    through the forge's API, and commits show the state of their runs. Without one, the command prints
    the steps.
    """
    body: Document = {"url": address_of(url)}
    body |= {"name": name} if name else {}
    body |= {"forge": forge or old_forge} if forge or old_forge else {}
    if token_env:
        body["token"] = _read_variable(token_env)
    if deploy_key_file:
        body["deploy_key"] = _read_key(deploy_key_file)
    if (app_id is None) != (app_key_file is None):
        raise click.UsageError("--app-id and --app-key-file belong together; give both")
    if app_id and app_key_file:
        body["app"] = {"id": app_id, "private_key": _read_key(app_key_file)}
    answer = client.post("/workspaces/connect", body)
    return Output(answer, _connected_lines(answer))


@command(None, "disconnect", example="headrace workspace disconnect sums")
@click.argument("name", metavar="WORKSPACE")
def disconnect(client: Client, name: str) -> Output:
    """Delete the webhook and the stored secrets of a workspace.

    The workspace and its runs stay. Pushes start no runs any more.
    """
    answer = client.delete(f"/workspaces/{path_segment(name)}/connection")
    hook: Document = answer["hook"]
    left = None
    if hook["problem"]:
        left = f"the webhook is still on the forge, delete it there: {hook['problem']}"
    elif not hook["deleted"]:
        left = "a webhook that was entered by hand stays on the forge; delete it there"
    return Output(answer, f"workspace {answer['workspace']['name']} is disconnected", left)


@command(None, "rotate-secret", example="headrace workspace rotate-secret sums")
@click.argument("name", metavar="WORKSPACE")
@click.option("--now", is_flag=True, help="The secret before is not valid any more, at once.")
def rotate_secret(client: Client, name: str, *, now: bool) -> Output:
    """Give the webhook a new secret.

    The secret before stays valid for 24 hours, so that no delivery is lost meanwhile.
    """
    answer = client.post(f"/workspaces/{path_segment(name)}/rotate-secret", {"now": now})
    return Output(answer, _new_secret_lines(answer))


def _new_secret_lines(answer: Document) -> Iterator[str]:
    hook: Document = answer["hook"]
    yield f"the webhook of workspace {answer['workspace']['name']} has a new secret"
    if hook["made"]:
        yield "the forge signs with it from now on"
        return
    if hook["problem"]:
        yield f"the forge could not be given the secret: {hook['problem']}"
    yield f"enter it on the forge, in the webhook that posts to {hook['url']}"
    yield f"secret:  {hook['secret']}  (it is not shown again)"


def _connected_lines(answer: Document) -> Iterator[str]:
    """Say whether the forge has the webhook, and if not, how to enter it by hand."""
    hook: Document = answer["hook"]
    name, url = answer["workspace"]["name"], answer["workspace"]["url"]
    yield f"workspace {name} is connected to {url}"
    if hook["made"]:
        yield f"the forge posts pushes to {hook['url']}"
        return
    if hook["problem"]:
        yield f"the webhook could not be made: {hook['problem']}"
    yield "pushes are found without a webhook too, with a delay; to enter one by hand:"
    for number, step in enumerate(STEPS[str(answer.get("forge", answer.get("provider")))], 1):
        yield f"  {number}. {step}"
    yield f"address: {hook['url']}"
    if hook["secret"]:
        yield f"secret:  {hook['secret']}  (it is not shown again)"
    else:
        yield f"secret:  unchanged; a new one: headrace workspace rotate-secret {name}"


def _read_variable(name: str) -> str:
    """Return the value of an environment variable. Raises Failure, and never shows the value."""
    value = os.environ.get(name, "").strip()
    if not value:
        raise Failure(
            "VALIDATION",
            f"the environment variable {name} is not set or empty; put the token into it, for example "
            f"with: read -rs {name} && export {name}",
        )
    return value


def _read_key(path: Path) -> str:
    """Return the text of a key file. Raises Failure."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_KEY_BYTES + 1)
        if len(data) > MOST_KEY_BYTES:
            raise Failure(
                "VALIDATION", f"{path} has more than 64 KiB; give the file of a private key"
            )
        return data.decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise Failure(
            "VALIDATION", f"{path} cannot be read ({why}); give the file of a private key"
        ) from error
