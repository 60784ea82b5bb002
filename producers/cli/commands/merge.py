"""`headrace checkpoint merge`: fetch an adapter's files, each verified, and let the trainer merge them.

The merge is a program of its own (`trainer/model/merge.py`), for the command line imports no torch. It
works beside the target and moves it into place when it is whole, so that an interrupted merge leaves
nothing.
"""

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from producers.cli.checkpoint_files import ADAPTER_CONFIG, fetch_file
from producers.cli.client import Client, path_segment
from producers.cli.display.output import Document
from producers.cli.errors import Failure


def merge_checkpoint(
    client: Client, ref: str, directory: Path, *, base: str | None, dtype: str
) -> Document:
    """The merged model in `directory`; returns what was written. Raises Failure."""
    if directory.exists() and any(directory.iterdir()):
        raise Failure("CONFLICT", f"{directory} is not empty; name a new one")
    found: Document = client.get(f"/checkpoints/{path_segment(ref)}")["checkpoint"]
    exact = str(found.get("ref") or ref)
    if ADAPTER_CONFIG not in {file["name"] for file in found["files"]}:
        raise Failure(
            "NOT_AN_ADAPTER",
            f"{exact} was trained whole (advanced.tuning = full): there is no adapter to merge. Its "
            f"directory is a plain model already: headrace checkpoint download {exact} {directory}",
        )
    _require_torch()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".merge-", dir=directory.parent) as scratch:
        adapter, made = Path(scratch) / "adapter", Path(scratch) / "model"
        for file in found["files"]:
            fetch_file(client, path_segment(exact), file, adapter)
        _run_merge(adapter, made, base=base, dtype=dtype)
        made.rename(directory)
    files = [_describe_file(path, directory) for path in sorted(directory.rglob("*"))]
    return {"directory": str(directory.resolve()), "ref": exact, "dtype": dtype, "files": files}


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise Failure(
            "MISSING_LIBRARY",
            "merging needs torch, Transformers and PEFT on this machine; install them with: "
            "pip install 'headrace[train]'",
        )


def _run_merge(adapter: Path, made: Path, *, base: str | None, dtype: str) -> None:
    """Raises Failure with what the program said."""
    named = ["--base", base] if base else []
    program = [sys.executable, "-P", "-m", "trainer.model.merge", str(adapter), str(made)]
    done = subprocess.run(
        [*program, "--dtype", dtype, *named], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return
    said = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
    hint = "; --base names its base model on this machine" if base is None else ""
    raise Failure("MERGE_FAILED", f"the merge failed: {said[-1]}{hint}")


def _describe_file(path: Path, directory: Path) -> Document:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "name": str(path.relative_to(directory)),
        "size": path.stat().st_size,
        "sha256": digest,
    }
