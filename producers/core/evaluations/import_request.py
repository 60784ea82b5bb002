"""A request to import an evaluation that ran elsewhere: its run and files, as clients announce them.

Everything here comes from outside. A request that is not valid is refused with the name of each field.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import AfterValidator as After
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from infra.blobs.uploads import MAX_BYTES
from schemas.config import EvalConfig
from schemas.errors import InvalidConfig, Issue

INDEX, PROGRESS, LOGS = "index.jsonl", "progress.json", "logs.txt"
MOST_FILES = 10_000
LONGEST_PATH = 1024
LONGEST_PART = 255
"""Bytes of a part of a path, because file systems have this limit."""

SMALL_BYTES = 8 << 20
"""The most bytes of a file that is parsed."""

ISSUES_SHOWN = 20

OF_ATTEMPT = re.compile(
    r"rollout_trials/(?P<attempt>[0-9a-f]{32})/"
    r"(?:(?P<trajectory>trajectory[A-Za-z0-9._-]*\.json)|artifacts/(?P<artifact>.+))"
)
ROWS = r"^[0-9]{1,9}(-[0-9]{1,9})?(,[0-9]{1,9}(-[0-9]{1,9})?)*$"


def _plain(text: str) -> str:
    """Raises ValueError for a character that neither a terminal nor the database can have."""
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs"):
            raise ValueError(f"must have no control characters, got U+{ord(character):04X}")
    return text


def _path(path: str) -> str:
    """Raises ValueError unless a path stays below its folder on every system."""
    _plain(path)
    if "\\" in path:
        raise ValueError("must have no backslash")
    parts = path.split("/")
    if path.startswith("/") or any(part in ("", ".", "..") for part in parts):
        raise ValueError("must be relative, without empty parts, '.' and '..'")
    if any(len(part.encode()) > LONGEST_PART for part in parts):
        raise ValueError(f"must have parts of at most {LONGEST_PART} bytes")
    if path not in (INDEX, PROGRESS, LOGS) and not OF_ATTEMPT.fullmatch(path):
        raise ValueError(
            f"must be {INDEX}, {PROGRESS}, {LOGS}, or below rollout_trials/ID/ a trajectory*.json or "
            "artifacts/FILE"
        )
    return path


Text = Annotated[str, StringConstraints(min_length=1, max_length=1000), After(_plain)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Path = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_PATH), After(_path)]


class _Given(BaseModel):
    """A JSON object of a client. Fields that a newer client adds are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class ImportedFile(_Given):
    """A file: its path below the folder of the run, its size in bytes, and its content."""

    path: Path
    size: int = Field(ge=0, le=MAX_BYTES, strict=True)
    sha256: Sha256


class ImportedRollout(_Given):
    name: Text
    source_digest: Text
    branch: Text | None = None
    commit_sha: Text | None = None


class ImportedDataset(_Given):
    """The dataset: the SHA-256 of its file, and which of its rows were evaluated, like `0-9,12`."""

    name: Text
    sha256: Sha256
    selected_source_rows: Annotated[str, StringConstraints(max_length=100_000, pattern=ROWS)]


class ImportedExperiment(_Given):
    rollout: ImportedRollout
    entrypoint: Text
    model_path: Text
    dataset: ImportedDataset


class ImportedEvaluation(_Given):
    n: int = Field(ge=1, le=1024, strict=True)
    pass_threshold: float


class ImportedRun(_Given):
    name: Text
    started_at: datetime
    completed_at: datetime
    experiment_config: ImportedExperiment
    evaluation_config: ImportedEvaluation


class ImportRequest(_Given):
    """An evaluation that ran elsewhere, and its files. `reimport` replaces its results, if it was
    imported before with others."""

    schema_version: int
    local_run_id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    manifest_digest: Sha256
    run: ImportedRun
    provenance: dict[Text, Text | bool] = Field(default={}, max_length=50)
    files: tuple[ImportedFile, ...] = Field(min_length=2, max_length=MOST_FILES)
    reimport: bool = False

    @classmethod
    def parse(cls, values: Mapping[str, object]) -> Self:
        """The request in a JSON object. Raises InvalidConfig with an issue for each field that is not
        valid."""
        try:
            found = cls.model_validate(values)
        except ValidationError as error:
            raise _refusal([_issue(one) for one in error.errors(include_url=False)]) from error
        if issues := [*found.find_issues()]:
            raise _refusal(issues)
        return found

    def find_issues(self) -> Sequence[Issue]:
        """The problems of fields that are valid by themselves."""
        issues = []
        if self.schema_version != 1:
            issues.append(Issue("schema_version", f"must be 1, got {self.schema_version}"))
        for name, at in (
            ("started_at", self.run.started_at),
            ("completed_at", self.run.completed_at),
        ):
            if at.tzinfo is None:
                issues.append(Issue(f"run.{name}", "must have a time zone, such as Z"))
        if not issues and self.run.completed_at < self.run.started_at:
            issues.append(Issue("run.completed_at", "must not be before run.started_at"))
        return [*issues, *self._file_issues()]

    def _file_issues(self) -> Sequence[Issue]:
        issues: list[Issue] = []
        seen: set[str] = set()
        folders = {
            path[:cut]
            for path in (one.path for one in self.files)
            for cut in range(len(path))
            if path[cut] == "/"
        }
        for number, one in enumerate(self.files):
            if one.path in seen:
                issues.append(Issue(f"files.{number}.path", f"{one.path[:200]!r} is there twice"))
            if one.path in folders:
                issues.append(
                    Issue(f"files.{number}.path", f"{one.path[:200]!r} is a folder of another file")
                )
            seen.add(one.path)
            match = OF_ATTEMPT.fullmatch(one.path)
            is_parsed = one.path != LOGS and (match is None or match["trajectory"])
            if is_parsed and one.size > SMALL_BYTES:
                limit = f"must be at most {SMALL_BYTES} for {one.path[:200]}, got {one.size}"
                issues.append(Issue(f"files.{number}.size", limit))
        issues += [
            Issue("files", f"must have {name}") for name in (INDEX, PROGRESS) if name not in seen
        ]
        return issues

    @property
    def content_sha256(self) -> str:
        """Identifies the manifest and all files, in any order."""
        files = sorted((one.path, one.size, one.sha256) for one in self.files)
        text = json.dumps([self.manifest_digest, files])
        return hashlib.sha256(text.encode()).hexdigest()

    def config(self) -> EvalConfig:
        """The evaluation as its TOML would say it. Raises InvalidConfig."""
        experiment, rollout = self.run.experiment_config, self.run.experiment_config.rollout
        branch = rollout.branch if rollout.commit_sha is None else None
        section: dict[str, Any] = {
            "rollout": rollout.name,
            "entrypoint": experiment.entrypoint,
            "model_path": experiment.model_path,
            "dataset": experiment.dataset.name,
            "branch": branch,
            "commit_sha": rollout.commit_sha,
        }
        try:
            return EvalConfig.model_validate(
                {"experiment": section, "evaluation": self.run.evaluation_config.model_dump()}
            )
        except ValidationError as error:
            found = [_issue(one) for one in error.errors(include_url=False)]
            named = [
                Issue(
                    f"run.{'experiment_config' if one.key.startswith('exp') else one.key}",
                    one.message,
                )
                for one in found
            ]
            raise _refusal(named) from error

    def selected_rows(self, num_rows: int) -> list[int]:
        """The dataset rows that were evaluated. Raises InvalidConfig when the dataset has fewer
        rows."""
        key = "run.experiment_config.dataset.selected_source_rows"
        text = self.run.experiment_config.dataset.selected_source_rows
        found: list[int] = []
        for part in text.split(","):
            first, _, last = part.partition("-")
            start, end = int(first), int(last or first)
            if start > end or (found and start <= found[-1]):
                raise _refusal([Issue(key, f"must be in ascending order, got {part!r}")])
            if end >= num_rows:
                message = f"names row {end}, and the dataset has {num_rows} rows, from 0"
                raise _refusal([Issue(key, message)])
            found += range(start, end + 1)
        return found


def _issue(error: Any) -> Issue:
    message = str(error["msg"]).removeprefix("Value error, ")
    return Issue(".".join(str(part) for part in error["loc"]), message[:1].lower() + message[1:])


def _refusal(issues: Sequence[Issue]) -> InvalidConfig:
    first = issues[0]
    return InvalidConfig(
        f"the import is not valid: {first.key} {first.message}", issues=tuple(issues[:ISSUES_SHOWN])
    )


def refuse(key: str, message: str) -> InvalidConfig:
    """The error for a field or a file of an import."""
    return _refusal([Issue(key, message)])
