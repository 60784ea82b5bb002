"""Generates the datasets that a config names as `reasoning-gym:TASK?...`, and uploads them once."""

import asyncio
import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from producers.cli.client import Client, path_segment
from producers.cli.display.output import Document, say
from producers.cli.errors import Failure

if TYPE_CHECKING:
    from schemas.toml.generated_tasks import GeneratedTasks


@dataclass(frozen=True, slots=True)
class Generated:
    """A dataset of the server, and whether it was generated now."""

    dataset: Document
    is_new: bool


def generate(ref: str) -> bytes:
    """The rows that a name describes, as JSON Lines. Raises Refused."""
    from schemas.toml.generated_tasks import parse_generated

    return asyncio.run(_generate(parse_generated(ref)))


def describe_rows(rows: bytes) -> str:
    """How many rows there are, and how long their questions are, to be compared with
    `training.max_prompt_length`."""
    lengths = [len(json.loads(line)["user_prompt"]) for line in rows.splitlines()]
    return f"{len(lengths)} rows; the longest question has {max(lengths)} characters"


async def _generate(tasks: "GeneratedTasks") -> bytes:
    from infra.sandbox.environments.local import load_settings, open_environments
    from infra.sandbox.generated_rows import generate_rows

    async with open_environments(load_settings()) as environments:
        return await generate_rows(tasks, environments)


def upload_generated(client: Client, ref: str, *, quiet: bool) -> Generated:
    """The dataset of a name. It is generated and uploaded if the server does not have it. Raises
    Refused."""
    from schemas.toml.generated_tasks import parse_generated

    name = parse_generated(ref).dataset_name
    if (found := _find(client, name)) is not None:
        return Generated(found, is_new=False)
    if not quiet:
        say(f"generating {ref} ...")
    rows = generate(ref)
    if not quiet:
        say(describe_rows(rows))
    announced = client.post("/datasets", {"name": name, "file_name": f"{name}.jsonl"})
    put = client.put(str(announced["upload"]["path"]), io.BytesIO(rows))
    return Generated(put["dataset"], is_new=True)


def _find(client: Client, name: str) -> Document | None:
    try:
        found: Document = client.get(f"/datasets/{path_segment(name)}")["dataset"]
    except Failure as failure:
        if failure.code == "NOT_FOUND":
            return None
        raise
    return found if found.get("status") == "uploaded" else None


def upload_datasets_of(client: Client, config: Document, *, quiet: bool) -> None:
    """Generate and upload the datasets of a config that are generated and that the server does not
    have. Raises Refused."""
    from schemas.toml.generated_tasks import is_generated

    for section, key in (("experiment", "dataset"), ("advanced", "validation_dataset")):
        keys = config.get(section)
        ref = keys.get(key) if isinstance(keys, dict) else None
        if isinstance(ref, str) and is_generated(ref):
            upload_generated(client, ref, quiet=quiet)
