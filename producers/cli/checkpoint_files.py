"""Downloading the files of a checkpoint, each verified against the hash in its manifest."""

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from producers.cli.client import Client, path_segment
from producers.cli.display.output import Document
from producers.cli.errors import Failure

ADAPTER_CONFIG = "adapter_config.json"
CHECKPOINT = re.compile(r"[^@\s/]+@([0-9]{1,9}|last|best(:[A-Za-z0-9_./-]{1,120})?)")
GITIGNORE = ".gitignore"
LOCAL_BASES = ("./base", "base")
"""The names under which a stored adapter refers to the base model in its own folder; before 0.2.0 it
was `base`."""


@contextmanager
def checkpoint_directory(ref: str) -> Iterator[str | None]:
    """A directory with the files of a checkpoint inside of the block, or None when `ref` is not the name
    of one. Raises Failure when the server does not have it."""
    if not CHECKPOINT.fullmatch(ref):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="headrace-checkpoint-") as directory:
        with Client() as client:
            found: Document = client.get(f"/checkpoints/{path_segment(ref)}")["checkpoint"]
            exact = path_segment(str(found.get("ref") or ref))
            for file in found["files"]:
                fetch_file(client, exact, file, Path(directory))
        yield directory


def fetch_file(client: Client, ref: str, file: Document, directory: Path) -> None:
    """Save one file of a checkpoint. Raises Failure when its hash is not the one in the manifest; the
    file is deleted then."""
    name = str(file["name"])
    target = directory / safe_name(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    sha256 = client.download(f"/checkpoints/{ref}/files/{quote(name, safe='/.')}", target)
    if sha256 != file["sha256"]:
        target.unlink()
        raise Failure(
            "CORRUPT",
            f"{name} has sha256 {sha256}, but the manifest says {file['sha256']}; try again, and use "
            "another checkpoint if this repeats, because the stored file is damaged",
        )


def keep_out_of_git(directory: Path) -> None:
    """Let git ignore a directory of weights, because a run takes all files of the repository along."""
    file = directory / GITIGNORE
    if not file.exists():
        file.write_text("# weights from headrace, too large for git\n*\n")


def safe_name(name: str) -> PurePosixPath:
    """A file name from a server as a relative path. Raises Failure when it would leave the directory."""
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\\" in name or "\0" in name:
        raise Failure(
            "CORRUPT",
            f"the checkpoint has an unsafe file name {name!r}; do not use this checkpoint",
        )
    return path


def name_local_base(directory: Path) -> Path | None:
    """Write the absolute path of the folder base/ into the adapter's config, so that PEFT finds the base
    model from any working directory. Returns that path, or None when the base has a public name or the
    directory has no adapter."""
    config, base = directory / ADAPTER_CONFIG, (directory / "base").resolve()
    if not config.is_file() or not base.is_dir():
        return None
    written = json.loads(config.read_bytes())
    if written.get("base_model_name_or_path") not in LOCAL_BASES:
        return None
    written["base_model_name_or_path"] = str(base)
    config.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    return base
