"""`headrace artifact`: versions of capabilities, tasks and models of an organisation."""

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import click

from producers.cli.client import Client, path_segment
from producers.cli.command import command
from producers.cli.command_tree import LIMIT, OFFSET, group
from producers.cli.datasets.archives import packed_archive, read_manifest, unpack_archive
from producers.cli.datasets.staged import file_digest, send_parts
from producers.cli.display.confirm import confirm
from producers.cli.display.output import Document, Output, fields, one_line, table, time_ago
from producers.cli.display.units import format_size
from producers.cli.errors import Failure

artifact = group(
    "artifact", "Capabilities, tasks and models in versions, which an organisation shares."
)

KINDS = ("capability", "task", "model")
KIND = click.argument("kind", metavar="KIND", type=click.Choice(KINDS))
REF = click.argument("ref", metavar="NAME[@VERSION]")
ORGANISATION = click.option(
    "--organisation", metavar="NAME", help="Organisation. Default: that of the API key."
)
COLUMNS = ("kind", "version", "versions", "size", "created", "summary")


@command(artifact, "push", example="headrace artifact push task ./sql-injection --version 1.1.0")
@KIND
@click.argument("source", metavar="FOLDER", type=click.Path(path_type=Path))
@click.option("--name", help="Name. Default: that of the manifest.")
@click.option("--version", help="Version, like 1.2.0. Default: that of the manifest.")
@ORGANISATION
def push(
    client: Client,
    kind: str,
    source: Path,
    *,
    name: str | None,
    version: str | None,
    organisation: str | None,
) -> Output:
    """Publish a version: a folder, or a tar.gz of one.

    A version is immutable. The same files again are the same version, and other files need a higher one.
    An upload that was interrupted goes on when the command is repeated.

    The folder of a capability has capability.yaml with name and version, that of a task has task.yaml
    with name, version, instruction and verification, and that of a model may have model.yaml.
    """
    with packed_archive(source) as archive:
        said = _names_in(read_manifest(archive, f"{kind}.yaml"))
        body = {
            "kind": kind,
            "name": name or said.get("name") or _missing("name", kind),
            "version": version or said.get("version") or _missing("version", kind),
            **({"organisation": organisation} if organisation else {}),
        }
        found, is_new = _publish(client, archive, body)
    how = "published" if is_new else "is published already:"
    size = format_size(found.get("size"))
    return Output(
        {"artifact": found, "is_new": is_new},
        f"{how} {kind} {_full_name(found)}: {found.get('num_files')} files, {size}",
    )


def _publish(client: Client, archive: Path, body: Mapping[str, str]) -> tuple[Document, bool]:
    size = archive.stat().st_size
    announced = {**body, "file_size": size, "sha256": file_digest(archive)}
    begun = client.post("/artifacts/uploads", announced)
    if begun["upload"] is None:
        found: Document = begun["artifact"]
        return found, False
    with archive.open("rb") as stream:
        parts = send_parts(
            client,
            stream,
            begun["upload"],
            renew=lambda: client.post("/artifacts/uploads", announced)["upload"],
        )
    request = {**body, "upload": begun["upload"]["id"], **({"parts": parts} if parts else {})}
    published: Document = client.post_slow("/artifacts", request)["artifact"]
    return published, True


def _names_in(manifest: str) -> dict[str, str]:
    """The name and the version of a manifest, as far as they are written plainly at its left edge. The
    server reads all of it."""
    found = {}
    for key in ("name", "version"):
        match = re.search(rf"^{key}:[ \t]*[\"']?([^\s\"'#]+)", manifest, re.MULTILINE)
        if match is not None:
            found[key] = match[1].rpartition("/")[2]
    return found


def _missing(what: str, kind: str) -> str:
    raise Failure(
        "INVALID_OPTION", f"the {what} is missing; write it into {kind}.yaml, or add --{what}"
    )


@command(artifact, "list", example="headrace artifact list --kind task --search sql")
@click.option("--kind", type=click.Choice(KINDS), help="List these only.")
@click.option("--search", metavar="TEXT", help="List those with TEXT in the name or the summary.")
@LIMIT
@OFFSET
@ORGANISATION
def list_(
    client: Client,
    *,
    kind: str | None,
    search: str | None,
    limit: int,
    offset: int,
    organisation: str | None,
) -> Output:
    """List artifacts, each with its latest version.

    They are those of an organisation. The latest version is the highest release, or the highest
    pre-release while there is no release.
    """
    query = {"kind": kind, "search": search, "limit": limit, "offset": offset}
    answer = client.get("/artifacts", {**query, "organisation": organisation})
    rows = [
        (
            one.get("name"),
            one.get("kind"),
            one.get("version"),
            one.get("num_versions"),
            format_size(one.get("size")),
            time_ago(one.get("created_at")),
            one_line(str(one.get("summary") or "")),
        )
        for one in answer["artifacts"]
    ]
    return Output(answer, table("Artifacts", ("name", *COLUMNS), rows))


@command(artifact, "info", example="headrace artifact info task sql-injection@1.1.0")
@KIND
@REF
@ORGANISATION
def info(client: Client, kind: str, ref: str, *, organisation: str | None) -> Output:
    """Show a version: its manifest and its files. Without a version, the latest one."""
    answer = client.get(_path(kind, ref), {"organisation": organisation})
    found: Document = answer["artifact"]
    shown = {key: value for key, value in found.items() if key not in ("files", "manifest")}
    for key in ("size", "unpacked_bytes"):
        shown[key] = format_size(found.get(key))
    files: list[Document] = found.get("files") or []
    rows = [(one.get("path"), format_size(one.get("size")), one.get("sha256")) for one in files]
    return Output(
        answer,
        fields(f"{kind} {_full_name(found)}", list(shown.items())),
        table("Files", ("path", "size", "sha256"), rows),
    )


@command(artifact, "versions", example="headrace artifact versions task sql-injection")
@KIND
@click.argument("name", metavar="NAME")
@ORGANISATION
def versions(client: Client, kind: str, name: str, *, organisation: str | None) -> Output:
    """List the versions of an artifact, the highest first."""
    answer = client.get(f"{_path(kind, name)}/versions", {"organisation": organisation})
    rows = [
        (
            one.get("version"),
            one.get("num_files"),
            format_size(one.get("size")),
            str(one.get("sha256"))[:12],
            time_ago(one.get("created_at")),
        )
        for one in answer["versions"]
    ]
    return Output(
        answer, table(f"{kind} {name}", ("version", "files", "size", "sha256", "created"), rows)
    )


@command(artifact, "pull", example="headrace artifact pull task sql-injection@1.1.0 ./task")
@KIND
@REF
@click.argument("folder", metavar="[FOLDER]", required=False, type=click.Path(path_type=Path))
@ORGANISATION
def pull(
    client: Client, kind: str, ref: str, folder: Path | None, *, organisation: str | None
) -> Output:
    """Download a version and unpack it into a new folder.

    Without FOLDER, it is named NAME-VERSION. The archive is compared with its
    hash before it is unpacked.
    """
    found: Document = client.get(_path(kind, ref), {"organisation": organisation})["artifact"]
    exact = f"{found['name']}@{found['version']}"
    target = folder or Path(f"{found['name']}-{found['version']}")
    if target.exists():
        raise Failure("CONFLICT", f"{target} already exists; name another folder")
    link = client.get(f"{_path(kind, exact)}/url", {"organisation": organisation})
    with tempfile.TemporaryDirectory() as directory:
        archive = Path(directory) / "archive.tar.gz"
        sha256 = client.download_signed(str(link["url"]), archive)
        if sha256 != found["sha256"]:
            raise Failure(
                "BAD_ANSWER",
                f"the archive of {exact} has the SHA-256 {sha256}, not {found['sha256']}; try again",
            )
        count = unpack_archive(archive, target)
    document = {"folder": str(target), "artifact": found["id"], "sha256": sha256, "files": count}
    return Output(document, f"saved {kind} {exact} in {target}: {count} files")


@command(artifact, "delete", example="headrace artifact delete task sql-injection@1.1.0 --yes")
@KIND
@click.argument("ref", metavar="NAME@VERSION")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@ORGANISATION
def delete(
    client: Client, kind: str, ref: str, *, yes: bool, organisation: str | None, as_json: bool
) -> Output:
    """Withdraw a version permanently. Only an owner may do so.

    The server refuses this while something uses the version. Afterwards the version can only be
    published again with the same content.
    """
    confirm(f"withdraw {kind} {ref}", yes=yes, as_json=as_json)
    query = {"organisation": organisation} if organisation else {}
    answer = client.delete(_path(kind, ref), **query)
    return Output(answer, f"withdrew {kind} {ref}")


def _path(kind: str, ref: str) -> str:
    return f"/artifacts/{kind}/{path_segment(ref)}"


def _full_name(found: Document) -> str:
    return f"{found.get('name')}@{found.get('version')}"
