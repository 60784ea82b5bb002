"""The files of an evaluation, as clients download them: its figures, its log, a line for each row, the
attempts one by one, and what their workflows left behind.

The text of a file is made when it is asked for, from the same records each time. So its size is known
before it is sent, and does not change once the evaluation has ended.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from infra.readmodel.evaluation_results import AttemptResult, RowResult
from infra.spine.ports.artifacts import Artifacts
from schemas.artifact_refs import ArtifactRef
from schemas.errors import InvalidConfig, Issue, NotFound
from schemas.models.openai_messages import openai_message
from schemas.sampling import SampleBatch, SampleRecord

FileKind = Literal["metrics", "trajectories", "artifacts", "logs"]
KINDS: tuple[FileKind, ...] = get_args(FileKind)

METRICS, LOGS, SUMMARY = "metrics.json", "logs.txt", "summary.jsonl"
ATTEMPT = re.compile(
    r"(?P<kind>trajectories|artifacts)/row-(?P<row>[0-9]{6,9})/attempt-(?P<number>[0-9]{3,6})"
    r"(?P<rest>\.json|/.+)"
)
ROWS = re.compile(r"[0-9]{1,9}(-[0-9]{1,9})?(,[0-9]{1,9}(-[0-9]{1,9})?)*")


@dataclass(frozen=True, slots=True)
class EvaluationFile:
    """A file: `data` is its content, or `ref` is where its content is stored."""

    path: str
    data: bytes | None = None
    ref: ArtifactRef | None = None

    @property
    def size(self) -> int:
        """The number of bytes."""
        if self.ref is not None:
            return self.ref.size
        return len(self.data or b"")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which files are wanted: of these kinds, and of attempts only those at these rows (None: all)."""

    kinds: frozenset[FileKind] = frozenset(KINDS)
    rows: tuple[range, ...] | None = None

    @classmethod
    def parse(cls, kinds: str | None, rows: str | None) -> "Selection":
        """The selection that a query names, like `metrics,logs` and `0,3-5`. Raises InvalidConfig."""
        wanted = [kind for kind in (kinds or "").split(",") if kind]
        unknown = [kind for kind in wanted if kind not in (*KINDS, "all")]
        if unknown:
            message = f"must be of {', '.join(KINDS)} or all, got {unknown[0][:40]!r}"
            raise InvalidConfig(f"types {message}", issues=(Issue("types", message),))
        every = not wanted or "all" in wanted
        return cls(
            frozenset(kind for kind in KINDS if every or kind in wanted),
            _ranges(rows) if rows else None,
        )

    def has(self, row: int) -> bool:
        """Whether attempts at a row are wanted."""
        return self.rows is None or any(row in one for one in self.rows)


def _ranges(text: str) -> tuple[range, ...]:
    if not ROWS.fullmatch(text):
        message = f"must be numbers and ranges like 0,3-5, got {text[:40]!r}"
        raise InvalidConfig(f"rows {message}", issues=(Issue("rows", message),))
    bounds = (part.partition("-") for part in text.split(","))
    return tuple(range(int(first), int(last or first) + 1) for first, _, last in bounds)


class EvaluationFiles:
    """The files of one evaluation. `results` are its rows, `figures` the content of metrics.json, and
    `log_lines` those of its log, unless an import brought its own `logs` along."""

    def __init__(
        self,
        artifacts: Artifacts,
        results: Sequence[RowResult],
        *,
        figures: Mapping[str, object],
        log_lines: Sequence[str],
        logs: ArtifactRef | None = None,
    ) -> None:
        self._artifacts = artifacts
        self._results = results
        self._figures = figures
        self._log_lines = log_lines
        self._own_logs = logs
        self._batches: dict[str, SampleBatch] = {}

    async def list_files(self, selection: Selection) -> list[EvaluationFile]:
        """The files of a selection."""
        found = []
        if "metrics" in selection.kinds:
            found.append(self._metrics())
        if "logs" in selection.kinds:
            found.append(self._logs())
        if "trajectories" in selection.kinds:
            found.append(self._summary())
        for result in self._results:
            if selection.has(result.row) and selection.kinds & {"trajectories", "artifacts"}:
                found += await self._of_row(result, selection.kinds)
        return found

    async def find_file(self, path: str) -> EvaluationFile:
        """The file with a path. Raises NotFound."""
        whole = {METRICS: self._metrics, LOGS: self._logs, SUMMARY: self._summary}
        if path in whole:
            return whole[path]()
        match = ATTEMPT.fullmatch(path)
        for result in self._results if match else ():
            if match and result.row == int(match["row"]):
                for file in await self._of_row(result, frozenset(KINDS)):
                    if file.path == path:
                        return file
        raise NotFound(
            f"the evaluation has no file {path[:200]!r}; `headrace eval files EVAL` lists all"
        )

    async def _of_row(self, result: RowResult, kinds: frozenset[FileKind]) -> list[EvaluationFile]:
        found = []
        for attempt in result.attempts:
            record = await self._record(attempt)
            place = f"row-{result.row:06}/attempt-{attempt.number:03}"
            if "trajectories" in kinds:
                content = _json_of(_trajectory(result.row, attempt, record))
                found.append(EvaluationFile(f"trajectories/{place}.json", content))
            if "artifacts" in kinds and record.output is not None:
                found += [
                    EvaluationFile(f"artifacts/{place}/{name}", ref=ref)
                    for name, ref in sorted(record.output.files.items())
                ]
        return found

    async def _record(self, attempt: AttemptResult) -> SampleRecord:
        """The sample of an attempt. The batch of its group is read once."""
        group = attempt.group
        batch = self._batches.get(group.group)
        if batch is None:
            ref = ArtifactRef.model_validate_json(group.artifact)
            batch = SampleBatch.model_validate_json(await self._artifacts.get_artifact(ref))
            self._batches = {group.group: batch}
        by_index = {record.index: record for record in batch.samples}
        return by_index.get(attempt.index, SampleRecord(index=attempt.index))

    def _metrics(self) -> EvaluationFile:
        return EvaluationFile(METRICS, _json_of(self._figures))

    def _logs(self) -> EvaluationFile:
        if self._own_logs is not None:
            return EvaluationFile(LOGS, ref=self._own_logs)
        return EvaluationFile(LOGS, "".join(f"{line}\n" for line in self._log_lines).encode())

    def _summary(self) -> EvaluationFile:
        lines = (json.dumps(result.to_json(), ensure_ascii=False) for result in self._results)
        return EvaluationFile(SUMMARY, "".join(f"{line}\n" for line in lines).encode())


def _trajectory(row: int, attempt: AttemptResult, record: SampleRecord) -> Mapping[str, object]:
    return {
        "row": row,
        "attempt": attempt.number,
        "reward": attempt.reward,
        "failure": attempt.failure,
        "messages": [openai_message(message) for message in record.messages],
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "truncated": record.truncated,
    }


def _json_of(value: Mapping[str, object]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, indent=2, default=str)
    return f"{text}\n".encode("utf-8", "backslashreplace")
