"""The results in the files of an imported evaluation: its attempts, their rewards, and what they mean.

An attempt that failed counts with the reward 0 and does not pass, and one that was skipped counts
nowhere, as in the figures of the program that made it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from infra.readmodel.estimates import estimate_mean
from producers.core.datasets.strict_json import loads
from producers.core.evaluations.import_request import (
    INDEX,
    OF_ATTEMPT,
    PROGRESS,
    ImportRequest,
    refuse,
)
from producers.core.evaluations.trajectories import AtifTrajectory
from schemas.errors import FailureCategory
from schemas.limits import LARGEST_REWARD
from schemas.sampling import Grade, SampleFailure, SampleOutput, SampleRecord

MOST_SHOWN = 200


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, strict=True)


L = TypeVar("L", bound=_Line)


class LocalAttempt(_Line):
    """A line of the index: attempt `run_index` at the selected row `row_index`, both from 0."""

    row_index: int = Field(ge=0)
    run_index: int = Field(ge=0)
    rollout_id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    status: Literal["success", "failed", "skipped"]
    trajectory_filename: str | None = None
    reward: float | None = Field(default=None, ge=-LARGEST_REWARD, le=LARGEST_REWARD)
    tokens: int | None = Field(default=None, ge=0, lt=1 << 53)
    error_type: str | None = Field(default=None, max_length=1000)

    @property
    def trajectory(self) -> str | None:
        """The path of its trajectory."""
        name = self.trajectory_filename
        return None if name is None else f"rollout_trials/{self.rollout_id}/{name}"

    def grade(self, index: int) -> Grade:
        """Its grade, at this place of its row."""
        if self.status == "success" and self.reward is None:
            return _failed_grade(index, "the local run recorded no reward")
        if self.reward is None:
            kind = "".join(
                c if c.isprintable() else " " for c in self.error_type or "no reason given"
            )
            return _failed_grade(index, f"failed in the local run: {kind[:MOST_SHOWN]}")
        return Grade(index=index, reward=self.reward)


class _Progress(_Line):
    total_runs: int
    sampled_rows: int
    total_dataset_rows: int


@dataclass(frozen=True, slots=True)
class ImportFigures:
    """The figures of an import: its mean reward, and all metrics by name."""

    reward: float | None
    metrics: Mapping[str, float]


def _failed_grade(index: int, message: str) -> Grade:
    failure = SampleFailure(category=FailureCategory.AGENT, message=message)
    return Grade(index=index, reward=None, failure=failure)


def parse_index(data: bytes, request: ImportRequest, *, num_rows: int) -> list[list[LocalAttempt]]:
    """The attempts at each of the `num_rows` selected rows, in order. Raises InvalidConfig unless each
    attempt is there once, and every file belongs to one."""
    n = request.run.evaluation_config.n
    found: dict[tuple[int, int], LocalAttempt] = {}
    ids: set[str] = set()
    lines = _text(data, INDEX).split("\n")
    if len(lines) > num_rows * n + 1:
        most = f"has {len(lines)} lines, and {num_rows} rows with {n} runs have {num_rows * n}"
        raise refuse(INDEX, most)
    for number, line in enumerate(lines, start=1):
        if not line and number == len(lines):
            break
        where = f"{INDEX}:{number}"
        attempt = _parse(LocalAttempt, line, where)
        if attempt.row_index >= num_rows or attempt.run_index >= n:
            raise refuse(where, f"must be of rows 0 to {num_rows - 1} and runs 0 to {n - 1}")
        key = (attempt.row_index, attempt.run_index)
        if key in found or attempt.rollout_id in ids:
            raise refuse(where, "repeats the row and run, or the rollout_id, of another line")
        found[key] = attempt
        ids.add(attempt.rollout_id)
    if len(found) != num_rows * n:
        raise refuse(INDEX, f"has {len(found)} of {num_rows * n} attempts; let the run finish")
    _check_files(request, found.values())
    return [[found[row, run] for run in range(n)] for row in range(num_rows)]


def check_progress(data: bytes, request: ImportRequest, *, num_rows: int, of: int) -> None:
    """Check that the run says of itself that it evaluated `num_rows` of the `of` rows of its dataset.
    Raises InvalidConfig."""
    progress = _parse(_Progress, _text(data, PROGRESS), PROGRESS)
    wanted = {
        "total_runs": num_rows * request.run.evaluation_config.n,
        "sampled_rows": num_rows,
        "total_dataset_rows": of,
    }
    for name, value in wanted.items():
        if getattr(progress, name) != value:
            raise refuse(f"{PROGRESS}.{name}", f"must be {value}, got {getattr(progress, name)}")


def record_of(
    attempt: LocalAttempt,
    index: int,
    trajectory: AtifTrajectory | None,
    output: SampleOutput | None,
) -> SampleRecord:
    """An attempt as a sample. Raises InvalidConfig when the trajectory is that of another attempt."""
    if trajectory is None:
        return SampleRecord(index=index, output=output)
    here = (attempt.row_index, attempt.run_index)
    if trajectory.attempt != attempt.rollout_id or trajectory.place != here:
        raise refuse(str(attempt.trajectory), "is the trajectory of another attempt")
    messages = trajectory.messages()
    answers = [one.content for one in messages if one.role == "assistant"]
    return SampleRecord(
        index=index,
        messages=messages,
        text=answers[-1] if answers else "",
        num_turns=trajectory.num_turns,
        prompt_tokens=trajectory.prompt_tokens,
        completion_tokens=trajectory.completion_tokens,
        output=output,
    )


def compute_figures(rows: Sequence[Sequence[Grade]], *, n: int, threshold: float) -> ImportFigures:
    """The figures of the grades at each row. pass@k is over the rows that have all `n`."""
    rewards = [_known_rewards(grade.counted_reward for grade in row) for row in rows]
    passes = [[float(_passes(grade, threshold)) for grade in row] for row in rows]
    metrics: dict[str, float] = {}
    if reward := estimate_mean([row for row in rewards if row]):
        metrics |= reward.figures("eval/reward")
    if rate := estimate_mean([row for row in passes if row], is_proportion=True):
        metrics |= rate.figures("eval/pass_rate")
    whole = [round(sum(row)) for row in passes if len(row) == n]
    for k in sorted({*(1 << power for power in range(n.bit_length())), n}) if whole else ():
        values = [(1 - comb(n - count, k) / comb(n, k),) for count in whole]
        if found := estimate_mean(values, is_proportion=True):
            metrics |= found.figures(f"eval/pass@{k}")
    return ImportFigures(metrics.get("eval/reward"), metrics)


def _known_rewards(rewards: Any) -> list[float]:
    return [reward for reward in rewards if reward is not None]


def _passes(grade: Grade, threshold: float) -> bool:
    return grade.reward is not None and grade.reward >= threshold


def _check_files(request: ImportRequest, attempts: Any) -> None:
    """Check that each trajectory is there, and that no other file is."""
    wanted = {one.rollout_id: one.trajectory for one in attempts}
    there = {one.path for one in request.files}
    for path in wanted.values():
        if path is not None and path not in there:
            raise refuse("files", f"must have {path[:MOST_SHOWN]!r}, which {INDEX} names")
    for number, one in enumerate(request.files):
        match = OF_ATTEMPT.fullmatch(one.path)
        if match is None:
            continue
        if match["attempt"] not in wanted:
            raise refuse(f"files.{number}.path", f"is of an attempt that {INDEX} does not have")
        if match["trajectory"] and wanted[match["attempt"]] != one.path:
            raise refuse(f"files.{number}.path", f"is a trajectory that {INDEX} does not name")


def _parse(kind: type[L], text: str, where: str) -> L:
    """The line in a text. Raises InvalidConfig."""
    try:
        return kind.model_validate(loads(text))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join([where, *(str(part) for part in first["loc"])])
        raise refuse(key, first["msg"][:1].lower() + first["msg"][1:]) from error
    except (ValueError, RecursionError) as error:
        raise refuse(where, f"is not valid JSON: {str(error)[:MOST_SHOWN]}") from error


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise refuse(where, f"is not UTF-8 at byte {error.start}") from error
