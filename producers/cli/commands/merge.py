"""`headrace checkpoint merge`: download an adapter's verified files, and let the trainer merge them.

The merge is a separate program (`trainer/model/merge.py`), because the command line does not import
torch. It writes next to the target and moves the result into place when it is complete, so an
interrupted merge leaves no files.
"""

import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from producers.cli.checkpoint_files import ADAPTER_CONFIG, GITIGNORE, fetch_file, keep_out_of_git
from producers.cli.client import Client, path_segment
from producers.cli.display.output import Document, say
from producers.cli.errors import Failure

REWARD_MODEL = "SEQ_CLS"
"""The task that PEFT names in the config of such an adapter."""


def merge_checkpoint(
    client: Client, ref: str, directory: Path, *, base: str | None, dtype: str, quiet: bool
) -> Document:
    """Write the merged model into `directory`; returns the list of its files. Says what it does unless
    `quiet`. Raises Failure."""
    if directory.exists() and any(directory.iterdir()):
        raise Failure("CONFLICT", f"{directory} is not empty; name a new or empty directory")
    found: Document = client.get(f"/checkpoints/{path_segment(ref)}")["checkpoint"]
    exact = str(found.get("ref") or ref)
    if ADAPTER_CONFIG not in {file["name"] for file in found["files"]}:
        raise Failure(
            "NOT_AN_ADAPTER",
            f"{exact} has no adapter to merge, because all its weights were trained (advanced.tuning = "
            f"full); download it as a plain model: headrace checkpoint download {exact} {directory}",
        )
    _require_torch()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".merge-", dir=directory.parent) as scratch:
        adapter, made = Path(scratch) / "adapter", Path(scratch) / "model"
        if not quiet:
            say(f"downloading {exact} ...")
        for file in found["files"]:
            fetch_file(client, path_segment(exact), file, adapter)
        _refuse_reward_model(adapter, exact)
        if not quiet:
            say(f"merging it in {dtype} ...")
        _run_merge(adapter, made, base=base, dtype=dtype)
        keep_out_of_git(made)
        _apply_umask(made)
        made.rename(directory)
    paths = sorted(path for path in directory.rglob("*") if path.name != GITIGNORE)
    files = [_describe_file(path, directory) for path in paths]
    return {"directory": str(directory.resolve()), "ref": exact, "dtype": dtype, "files": files}


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise Failure(
            "MISSING_LIBRARY",
            "torch is not installed; merging needs torch, Transformers and PEFT: "
            "pip install 'headrace[train]'",
        )


def _refuse_reward_model(adapter: Path, exact: str) -> None:
    """Raise Failure if the adapter is that of a reward model."""
    if json.loads((adapter / ADAPTER_CONFIG).read_bytes()).get("task_type") == REWARD_MODEL:
        raise Failure(
            "REWARD_MODEL",
            f"{exact} is a reward model, which scores answers and writes none; name it in "
            "advanced.reward_models of a run, and merge a checkpoint of another algorithm",
        )


def _run_merge(adapter: Path, made: Path, *, base: str | None, dtype: str) -> None:
    """Run the merge program. Raises Failure with its last line of output."""
    named = ["--base", base] if base else []
    program = [sys.executable, "-P", "-m", "trainer.model.merge", str(adapter), str(made)]
    completed = subprocess.run(
        [*program, "--dtype", dtype, *named], capture_output=True, text=True, check=False
    )
    if completed.returncode == 0:
        return
    error_lines = completed.stderr.strip().splitlines() or [f"exit code {completed.returncode}"]
    hint = "; name its base model with --base" if base is None else ""
    raise Failure("MERGE_FAILED", f"the merge failed: {error_lines[-1]}{hint}")


def _apply_umask(made: Path) -> None:
    """Let others read the model's files as far as the umask lets them read new files. safetensors writes
    its own for their owner alone."""
    mode = (made / GITIGNORE).stat().st_mode & 0o777
    for path in made.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def _describe_file(path: Path, directory: Path) -> Document:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "name": str(path.relative_to(directory)),
        "size": path.stat().st_size,
        "sha256": digest,
    }
