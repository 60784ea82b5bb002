"""`python -m infra.blobs.hub.upload_program`: one upload with the hub's own client.

It reads the request from its standard input, and prints one line of JSON: the commit, or an error with
its kind (`refused`, `away`, `broken`). It ends when its input is closed, because its worker is gone.

The commit names the upload in its description. It is made on top of the head that was seen, so of two
processes that race only one commits, and the other one finds that commit.
"""

import json
import os
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError

from infra.settings.git import PRIVATE, AllowedAddresses

MARK = "Headrace-Upload: "
OLD_MARK = "Headrace-Push: "
"""The mark that earlier releases wrote. An upload that one of them began may go on in this one."""

RECORD = "headrace.json"
OWN = (".gitattributes",)
"""The files that the hub itself puts into a new repository."""
REPLACED = (".safetensors", ".safetensors.index.json", "adapter_config.json", "config.json")
"""How the files end that an upload deletes if it does not replace them: loaders look for them."""
THREADS = 2
NO_ROOM = 507
"""The status of a hub whose storage for an account is full. Asking again does not help."""
MOST_WORDS = 600


class UploadRefused(Exception):
    """The upload cannot be carried out. The message says what to do."""


class HubBusy(Exception):
    """The hub asks to try again."""


def main() -> int:
    """Run one upload. Returns the exit code."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, args=(sys.stdin,), daemon=True).start()
    out = json.dumps(answer(request))
    sys.stdout.write(out + "\n")
    sys.stdout.flush()
    return 0


def _end_with_input(stream: TextIO) -> None:
    stream.read()
    os._exit(1)


def answer(request: Mapping[str, Any]) -> Mapping[str, object]:
    """The commit of an upload as {url, revision}, or {kind, error, pause_s}."""
    hub = str(request["endpoint"])
    try:
        only_dial_checked_addresses(hub)
        return _upload(request)
    except UploadRefused as error:
        return {"kind": "refused", "error": str(error)}
    except HubBusy as error:
        return {"kind": "away", "error": str(error)}
    except (
        Exception
    ) as error:  # the client has errors of several libraries, also around the hub's own
        return _classify(error, hub)


def only_dial_checked_addresses(hub: str) -> None:
    """Refuse every connection of this process to an address that is not public, except that a hub on
    this machine, or in a private network, has neighbours there. The address is checked when it is
    dialled, after the name was resolved."""
    parts = urlsplit(hub)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    found = {str(a[0]) for *_, a in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    public = AllowedAddresses()
    near = {address for address in found if not public.permits(address)}
    allowed = AllowedAddresses(
        loopback=any(AllowedAddresses(loopback=True).permits(one) for one in near),
        private=bool(PRIVATE) and any(AllowedAddresses(private=True).permits(one) for one in near),
    )

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "socket.connect":
            return
        address = arguments[1]
        if not isinstance(address, tuple) or not allowed.permits(str(address[0])):
            raise UploadRefused(
                f"the hub names the address {address!r}, which is not public; check HF_ENDPOINT"
            )

    sys.addaudithook(check)


def _upload(request: Mapping[str, Any]) -> Mapping[str, object]:
    api = HfApi(endpoint=request["endpoint"], token=request["token"])
    repository, private = str(request["repository"]), bool(request["private"])
    api.create_repo(repository, private=private, exist_ok=True)
    head = api.model_info(repository)
    wanted = "private" if private else "public"
    if bool(head.private) != private:
        is_now = "private" if head.private else "public"
        raise UploadRefused(
            f"{repository} exists and is {is_now}; upload with --{is_now}, or choose another name "
            f"for a {wanted} repository"
        )
    if made := _commit_of(api, repository, str(request["id"])):
        return _result(request, made)
    present = {file.rfilename for file in head.siblings or ()} - {*OWN}
    if present and RECORD not in present:
        raise UploadRefused(
            f"{repository} exists and was not made by Headrace (it has no {RECORD}); choose another name"
        )
    revision = _commit(api, request, present=present, parent=head.sha)
    return _result(request, revision)


def _result(request: Mapping[str, Any], revision: str) -> Mapping[str, object]:
    return {"url": f"{request['endpoint']}/{request['repository']}", "revision": revision}


def _commit(
    api: HfApi, request: Mapping[str, Any], *, present: set[str], parent: str | None
) -> str:
    """Make the commit on top of `parent`. Files that the hub has already are not uploaded again."""
    directory, repository = Path(request["directory"]), str(request["repository"])
    paths = {
        path.relative_to(directory).as_posix(): path
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    stale = [name for name in sorted(present - {*paths}) if name.endswith(REPLACED)]
    try:
        made = api.create_commit(
            repository,
            operations=[
                *(CommitOperationAdd(name, str(path)) for name, path in paths.items()),
                *(CommitOperationDelete(name) for name in stale),
            ],
            commit_message=str(request["title"]),
            commit_description=f"{MARK}{request['id']}",
            parent_commit=parent,
            num_threads=THREADS,
        )
    except HfHubHTTPError as error:
        if error.response.status_code not in (409, 412):
            raise
        if found := _commit_of(api, repository, str(request["id"])):
            return found  # another process made it
        raise HubBusy(f"{repository} was changed during the upload") from error
    return str(made.oid)


def _commit_of(api: HfApi, repository: str, upload: str) -> str | None:
    """The commit that an earlier attempt at this upload made, if there is one."""
    for commit in api.list_repo_commits(repository):
        lines = (commit.message or "").split("\n")
        if f"{MARK}{upload}" in lines or f"{OLD_MARK}{upload}" in lines:
            return str(commit.commit_id)
    return None


def _classify(error: BaseException, hub: str) -> Mapping[str, object]:
    """An error of the client: refused by the hub, or away."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HfHubHTTPError | UploadRefused):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, UploadRefused):
        return {"kind": "refused", "error": str(cause)}
    if not isinstance(cause, HfHubHTTPError):
        if isinstance(error, OSError) or _is_of_transport(error):
            return {"kind": "away", "error": f"{hub} does not answer ({type(error).__name__})"}
        return {"kind": "broken", "error": f"the hub's client failed: {_short(repr(error))}"}
    status = cause.response.status_code
    words = _words(cause)
    if status in (408, 425, 429) or (status >= 500 and status != NO_ROOM):
        asked = cause.response.headers.get("Retry-After", "")
        pause = {"pause_s": float(asked)} if asked.isdigit() else {}
        return {"kind": "away", "error": f"{hub} answered {status}: {words}", **pause}
    return {"kind": "refused", "error": f"the hub answered {status}: {words}; {_advice(status)}"}


def _is_of_transport(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, is about the connection."""
    while error is not None:
        if any(kind.__name__ == "TransportError" for kind in type(error).__mro__):
            return True
        error = error.__cause__ or error.__context__
    return False


def _words(error: HfHubHTTPError) -> str:
    """The words of the hub itself."""
    said = error.server_message or error.response.headers.get("X-Error-Message")
    return _short(said or error.response.reason_phrase or "it gave no reason")


def _short(said: object) -> str:
    return " ".join(str(said).split())[:MOST_WORDS].rstrip(".")


def _advice(status: int) -> str:
    match status:
        case 401:
            return "store a valid token: headrace secret set HF_TOKEN"
        case 402 | 507:
            return "the account needs another plan or more storage"
        case 403:
            return (
                "the token needs write access to this namespace, and the account room for the files"
            )
        case 404:
            return "check the organisation's name, and that the token may see it"
        case 409:
            return "choose another name"
        case 413:
            return "the files are too large for this hub"
        case _:
            return "correct that and upload again"


if __name__ == "__main__":
    sys.exit(main())
