"""Manifests of artifacts: `capability.yaml`, `task.yaml` or `model.yaml` at the top of an archive.

A manifest is YAML of strangers. So it is read without tags, anchors and aliases, up to a size and a
depth, and becomes JSON.
"""

import datetime
from collections.abc import Mapping
from typing import Any

import yaml

from schemas.errors import InvalidConfig, Issue
from schemas.ids import ArtifactKind
from schemas.text import plain

FILES: Mapping[ArtifactKind, str] = {
    "capability": "capability.yaml",
    "task": "task.yaml",
    "model": "model.yaml",
}

REQUIRED: Mapping[ArtifactKind, tuple[str, ...]] = {
    "capability": ("name", "version"),
    "task": ("name", "version", "instruction", "verification"),
    "model": (),
}
"""The keys that the manifest of each kind must have. A model needs no manifest."""

MAX_BYTES = 256 << 10
MAX_DEPTH = 32
MAX_NODES = 20_000
MAX_SUMMARY = 500
MAX_INTEGER = 1 << 53


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Reads plain YAML: no aliases, which can multiply a document, and no key twice."""

    depth = 0
    nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise _bad("uses an alias (*name); write the value out", self.peek_event().start_mark)
        self.depth, self.nodes = self.depth + 1, self.nodes + 1
        mark = self.peek_event().start_mark
        if self.depth > MAX_DEPTH:
            raise _bad(f"is nested more than {MAX_DEPTH} levels; make it flatter", mark)
        if self.nodes > MAX_NODES:
            raise _bad(f"has more than {MAX_NODES} values; shorten it", mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002 - PyYAML's own signature
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, key in enumerate(keys):
            if not isinstance(key, str):
                raise _bad(f"has the key {key!r}; quote it, because keys are text", node.start_mark)
            if key in keys[:number]:
                raise _bad(f"has the key {key!r} twice; remove one", node.start_mark)
        return super().construct_mapping(node, deep=True)


def parse_manifest(data: bytes) -> dict[str, Any]:
    """A manifest as JSON has it. Raises InvalidConfig."""
    if len(data) > MAX_BYTES:
        raise InvalidConfig(f"has more than {MAX_BYTES >> 10} KiB; shorten it")
    try:
        found = yaml.load(data.decode(), _Loader)  # noqa: S506 - a SafeLoader
    except UnicodeDecodeError:
        raise InvalidConfig("is not UTF-8; save it as UTF-8") from None
    except yaml.YAMLError as error:
        raise InvalidConfig(
            f"cannot be read as YAML: {' '.join(str(error).split())[:300]}"
        ) from None
    except (ValueError, RecursionError, OverflowError) as error:
        raise InvalidConfig(f"cannot be read as YAML: {str(error)[:300]}") from None
    if not isinstance(found, dict):
        raise InvalidConfig("must be a mapping of keys to values, like name: my-task")
    read: dict[str, Any] = _plain(found)
    return read


def check_manifest(
    manifest: Mapping[str, Any], kind: ArtifactKind, *, name: str, version: str
) -> list[Issue]:
    """The issues of the manifest of a version. It must say the name and the version under which it
    is published, if it says any."""
    file = FILES[kind]
    issues = [
        Issue(f"{file}: {key}", "is missing; add it")
        for key in REQUIRED[kind]
        if manifest.get(key) in (None, "", {}, [])
    ]
    for key, published in (("name", name), ("version", version)):
        said = manifest.get(key)
        if said is None:
            continue
        if not isinstance(said, str):
            issues.append(
                Issue(f"{file}: {key}", f"must be text; quote it: {key}: {str(said)[:80]!r}")
            )
        elif said.rpartition("/")[2] != published:
            said = said[:80]
            message = f"is {said!r}, but {published!r} is published; make the two equal"
            issues.append(Issue(f"{file}: {key}", message))
    return issues


def summary_of(manifest: Mapping[str, Any]) -> str:
    """The description of a manifest in one line of at most 500 characters."""
    for key in ("summary", "description"):
        if isinstance(text := manifest.get(key), str):
            return plain(" ".join(text.split()))[:MAX_SUMMARY]
    return ""


def _plain(value: Any) -> Any:
    """A value of YAML as JSON has it."""
    match value:
        case dict():
            return {key: _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case datetime.date() | datetime.datetime():
            return value.isoformat()
        case float() if value != value or value in (float("inf"), float("-inf")):
            raise InvalidConfig(f"has the number {value}, which JSON does not know; quote it")
        case str():
            if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
                raise InvalidConfig("has a NUL or half of a character; remove it")
            return value
        case int() if not -MAX_INTEGER <= value <= MAX_INTEGER:
            raise InvalidConfig("has a number beyond 2^53, which JSON does not keep; quote it")
        case bool() | int() | float() | None:
            return value
    raise InvalidConfig(f"has a value of the type {type(value).__name__}; use text instead")


def _bad(message: str, mark: Any) -> InvalidConfig:
    return InvalidConfig(f"line {mark.line + 1} {message}")
