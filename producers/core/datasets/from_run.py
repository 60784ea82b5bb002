"""Datasets of recorded samples: the graded groups of a run or of an evaluation, read in the order of
their steps and slots, become rows (`producers/core/datasets/recorded_rows.py`).

The rows are registered like those of an upload. They depend on the log and the request alone, so the
same request makes the same content. A process that dies before the registration leaves no dataset.
"""

import asyncio
import fcntl
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from infra import failpoints
from infra.identity.quotas import Quotas
from infra.ports.services import Blobs
from infra.readmodel.runs import GroupRow
from infra.readmodel.store import ReadModel
from infra.spine.ports.artifacts import Artifacts
from infra.spine.ports.event_log import Cursor, EventLog, Recorded
from producers.core.datasets import registration
from producers.core.datasets.recorded_rows import (
    RecordedGroup,
    RowFilter,
    RowMaker,
    check_filter,
    left_out_texts,
    refusal_of,
)
from producers.core.datasets.rules import MIN_ROWS, FileReport
from producers.core.history.sample_search import GRADES
from producers.core.lookup import Lookup
from schemas.artifact_refs import ArtifactRef
from schemas.datasets import TRAJECTORY_COLUMNS, DatasetOrigin
from schemas.errors import CorruptData, InvalidConfig, NotFound, TransientError
from schemas.events import EvaluationRequested, GroupsRequested, RunRequested
from schemas.ids import Purpose
from schemas.sampling import ModelRef, SampleBatch
from schemas.specs import GroupTemplate

PAGE = 64
"""Groups that are in memory at once."""

AT_ONCE = 2
"""How many datasets a process makes at the same time. Others wait."""

PREFIX = "from-run-"
"""The names of files in which rows are written begin with this."""

MAX_BYTES = 5 << 30
LAST_STEP = 2**31 - 1


@dataclass(frozen=True, slots=True)
class StepRange:
    """The steps of a run that are wanted, both included; None leaves an end open."""

    first: int | None = None
    last: int | None = None


@dataclass(frozen=True, slots=True)
class SampleSource:
    """The run or evaluation whose samples are read: its id, its name, its model, the step that it begins
    after (of a fork that of its parent) and its last settled step (of an evaluation 0). `has_ended` is
    false while more steps may follow."""

    owner: str
    name: str
    purpose: Purpose
    model: ModelRef
    last_step: int
    has_ended: bool
    after_step: int = 0


Templates = Mapping[int, GroupTemplate]
"""The template of the groups of each step."""


@dataclass(frozen=True, slots=True)
class Making:
    """A dataset that was made: the registered version (None after a dry run), where its rows come from,
    and the counts."""

    recorded: Recorded | None
    origin: DatasetOrigin
    counts: RowMaker
    has_ended: bool


class RecordedDatasets:
    """Makes datasets of the samples of runs and evaluations that the sender of a request may see."""

    def __init__(
        self,
        log: EventLog,
        lookup: Lookup,
        readmodel: ReadModel,
        *,
        artifacts: Artifacts,
        blobs: Blobs,
        quotas: Quotas,
        scratch: Path,
    ) -> None:
        self._log = log
        self._lookup = lookup
        self._readmodel = readmodel
        self._artifacts = artifacts
        self._blobs = blobs
        self._quotas = quotas
        self._scratch = scratch
        self._room = asyncio.Semaphore(AT_ONCE)

    async def make(
        self,
        ref: str,
        name: str,
        wanted: RowFilter,
        *,
        steps: StepRange = StepRange(),
        overwrites: bool = False,
        is_dry: bool = False,
    ) -> Making:
        """Make a dataset `name` of the samples of a run or evaluation. A dry run counts its rows and
        stores nothing. Raises NotFound; InvalidConfig when the request does not fit what is recorded,
        or too little is left; Conflict when the run is archived or the name has other content; and
        QuotaExceeded."""
        registration.check_name(name)
        check_filter(wanted)
        position = await self._log.visible_head()
        if not await self._readmodel.caught_up(position, timeout_s=60):
            raise TransientError("the read model is behind the log; try again")
        source = await self._find_source(ref)
        first, last = range_of(source, steps)
        templates = await self._read_templates(source)
        if wanted.kind == "trajectory":
            _check_sampling(source, templates)
        maker = RowMaker(wanted)
        async with self._room, _scratch_file(self._scratch) as path:
            await self._write(path, source, templates, maker, first=first, last=last)
            origin = _origin_of(source, wanted, maker, templates, first, last, position)
            _check_rows(maker, source, first, last)
            if is_dry:
                return Making(None, origin, maker, source.has_ended)
            failpoints.hit("from_run.written")
            size = (await asyncio.to_thread(path.stat)).st_size
            async with self._quotas.room_for_bytes(size):
                recorded = await self._register(path, name, origin, maker, overwrites=overwrites)
        return Making(recorded, origin, maker, source.has_ended)

    async def _find_source(self, ref: str) -> SampleSource:
        try:
            run = await self._lookup.whole_run(ref)
        except NotFound as error:
            return await self._find_evaluation(ref, error)
        return await self._source_of(run)

    async def _source_of(self, run: RunRequested) -> SampleSource:
        found = await self._readmodel.runs.get_run(run.run)
        if found is None:
            raise TransientError(f"run {run.run_name} is not in the read model yet; try again")
        row, _ = found
        return SampleSource(
            owner=run.run,
            name=run.run_name,
            purpose=Purpose.TRAIN,
            model=run.model,
            last_step=row["current_step"] or 0,
            has_ended=row["completed_at"] is not None,
            after_step=run.fork.step if run.fork else 0,
        )

    async def _find_evaluation(self, ref: str, no_run: NotFound) -> SampleSource:
        try:
            found = await self._lookup.evaluation(ref)
        except NotFound:
            raise no_run from None
        if not isinstance(found, EvaluationRequested):
            raise InvalidConfig(
                f"evaluation {found.eval_name} was imported, so no samples of it are recorded here; "
                "name a run or an evaluation that ran here"
            )
        row = await self._readmodel.evaluations.get_evaluation(found.evaluation)
        return SampleSource(
            owner=found.evaluation,
            name=found.eval_name,
            purpose=Purpose.EVALUATE,
            model=found.template.model,
            last_step=0,
            has_ended=row is not None and row["completed_at"] is not None,
        )

    async def _read_templates(self, source: SampleSource) -> Templates:
        """The template of the first groups of each step."""
        found: dict[int, GroupTemplate] = {}
        cursor = Cursor()
        types = [GroupsRequested.type]
        while page := await self._log.read(source.owner, after=cursor, limit=256, types=types):
            for recorded in page:
                event = recorded.event
                if isinstance(event, GroupsRequested) and event.purpose == source.purpose:
                    found.setdefault(event.step, event.template)
            cursor = page[-1].cursor
        return found

    async def _write(
        self,
        path: Path,
        source: SampleSource,
        templates: Templates,
        maker: RowMaker,
        *,
        first: int,
        last: int,
    ) -> None:
        """Write the rows of all groups of these steps. Raises InvalidConfig when they are too large."""
        size = 0
        with path.open("wb") as file:
            async for rows in self._pages(source, first, last):
                size += await self._write_page(file, rows, templates, maker)
                if size > MAX_BYTES:
                    raise InvalidConfig(
                        f"the rows have more than {MAX_BYTES >> 30} GiB; name fewer steps with --steps, "
                        "or set --limit"
                    )
                if maker.is_full:
                    return

    async def _pages(
        self, source: SampleSource, first: int, last: int
    ) -> AsyncIterator[Sequence[GroupRow]]:
        place = (first - 1, LAST_STEP, LAST_STEP)
        while page := await self._readmodel.runs.groups_after(
            source.owner, str(source.purpose), place, last_step=last, limit=PAGE
        ):
            yield page
            place = (page[-1].step, page[-1].slot, page[-1].replacement)

    async def _write_page(
        self,
        file: BinaryIO,
        rows: Sequence[GroupRow],
        templates: Templates,
        maker: RowMaker,
    ) -> int:
        """Write the rows of some groups; returns their bytes."""
        refs = [ArtifactRef.model_validate_json(row.artifact) for row in rows]
        contents = await asyncio.gather(
            *(self._artifacts.get_artifact(ref, cached=False) for ref in refs)
        )

        def write() -> int:
            size = 0
            for row, ref, content in zip(rows, refs, contents, strict=True):
                if maker.is_full:
                    break
                template = templates.get(row.step)
                version = template.policy.version if template else 0
                group = RecordedGroup(
                    group=row.group,
                    version=version,
                    batch=_batch_of(content, ref),
                    grades=GRADES.validate_json(row.grades),
                )
                for line in maker.lines_of(group):
                    size += file.write(line)
            return size

        return await asyncio.to_thread(write)

    async def _register(
        self, path: Path, name: str, origin: DatasetOrigin, maker: RowMaker, *, overwrites: bool
    ) -> Recorded:
        if origin.is_trajectories:
            # They were written in the stored form, and are longer than the rows of an upload may be.
            report = FileReport(num_rows=maker.num_rows, columns=TRAJECTORY_COLUMNS)
            checked = registration.Checked(report, path)
        else:
            checked = await registration.check(path, "jsonl", out=_checked_path(path))
        return await registration.register(
            checked,
            path,
            name=name,
            file_name=f"{name}.jsonl",
            log=self._log,
            blobs=self._blobs,
            names=self._readmodel.names,
            overwrites=overwrites,
            origin=origin,
        )


@asynccontextmanager
async def _scratch_file(directory: Path) -> AsyncIterator[Path]:
    """A path for the rows, which is removed afterwards, or by the next call if this process dies."""
    handle, path = await asyncio.to_thread(_create, directory)
    try:
        yield path
    finally:
        await asyncio.shield(asyncio.to_thread(_delete, path))
        os.close(handle)


def _create(directory: Path) -> tuple[int, Path]:
    """A new file that stays locked while its handle is open."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in directory.glob(f"{PREFIX}*"):
        _delete_if_left(left)
    while True:
        handle, name = tempfile.mkstemp(prefix=PREFIX, dir=directory)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:  # or else another process took it for one that was left
            return handle, Path(name)
        os.close(handle)


def _delete_if_left(path: Path) -> None:
    """Delete the file of a process that died. The kernel has released its lock."""
    try:
        handle = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _delete(path)
    except BlockingIOError:
        pass
    finally:
        os.close(handle)


def _delete(path: Path) -> None:
    path.unlink(missing_ok=True)
    _checked_path(path).unlink(missing_ok=True)


def _checked_path(path: Path) -> Path:
    """The file beside it that its check writes."""
    return path.with_name(f"checked-{path.name}")


def range_of(source: SampleSource, steps: StepRange) -> tuple[int, int]:
    """The first and the last step to read. Raises InvalidConfig when the run does not have them."""
    if source.purpose == Purpose.EVALUATE:
        if steps != StepRange():
            raise refusal_of(
                "steps", f"has no meaning for {source.name}, which is an evaluation; leave it out"
            )
        return 0, LAST_STEP
    oldest = source.after_step + 1
    if source.last_step < oldest:
        raise InvalidConfig(f"run {source.name} has no settled step yet; wait for its first one")
    first, last = steps.first or oldest, steps.last or source.last_step
    if not oldest <= first <= last <= source.last_step:
        earlier = "; name its parent for earlier ones" if first < oldest != 1 else ""
        raise refusal_of(
            "steps",
            f"must be within {oldest}..{source.last_step}, the settled steps of {source.name}, got "
            f"{first}..{last}{earlier}",
        )
    return first, last


def made_json(made: Making) -> Mapping[str, object]:
    """The counts of a making as JSON."""
    counts, origin = made.counts, made.origin
    return {
        "samples": counts.num_samples,
        "groups": counts.num_groups,
        "rows": counts.num_rows,
        "samples_left_out": dict(sorted(counts.samples_left_out.items())),
        "groups_left_out": dict(sorted(counts.groups_left_out.items())),
        "left_out": _lost_texts(counts),
        "highest_reward": counts.highest,
        "lowest_reward": counts.lowest,
        "first_step": origin.first_step,
        "last_step": origin.last_step,
        "has_ended": made.has_ended,
        "position": origin.position,
    }


def _lost_texts(counts: RowMaker) -> list[str]:
    return [
        *left_out_texts(counts.samples_left_out, "samples"),
        *left_out_texts(counts.groups_left_out, "groups"),
    ]


def _check_sampling(source: SampleSource, templates: Templates) -> None:
    """Raises InvalidConfig when nothing can be learned from the recorded tokens."""
    if source.model.kind == "provider":
        raise refusal_of(
            "kind",
            f"cannot be trajectory for {source.name}: {source.model.name} is a provider's model, whose "
            "tokens are not recorded; use sft or preference",
        )
    if any(one.params.temperature == 0 for one in templates.values()):
        raise refusal_of(
            "kind",
            f"cannot be trajectory for {source.name}, which was sampled greedily: the samples of a row "
            "are equal, so nothing is learned from them; use sft or preference",
        )


def _check_rows(maker: RowMaker, source: SampleSource, first: int, last: int) -> None:
    """Raises InvalidConfig when there are too few rows for a dataset, and says why."""
    if maker.num_rows >= MIN_ROWS:
        return
    where = f"{source.name}" if source.purpose == Purpose.EVALUATE else f"steps {first}..{last}"
    if not maker.num_samples:
        raise InvalidConfig(
            f"there are no graded samples in {where}; name other steps or another run"
        )
    if maker.highest is None:
        raise InvalidConfig(
            f"no sample in {where} has a reward, so nothing can be chosen; `headrace train samples "
            f"{source.name}` shows why"
        )
    lost = _lost_texts(maker)
    raise InvalidConfig(
        f"{maker.num_samples} samples in {where} give {maker.num_rows} rows, and a dataset needs at "
        f"least {MIN_ROWS}; their rewards are from {maker.lowest:g} to {maker.highest:g}"
        + (f": {', '.join(lost)}" if lost else "")
        + "; choose more steps or weaker filters"
    )


def _origin_of(
    source: SampleSource,
    wanted: RowFilter,
    maker: RowMaker,
    templates: Templates,
    first: int,
    last: int,
    position: Cursor,
) -> DatasetOrigin:
    is_run = source.purpose == Purpose.TRAIN
    sampled = next(iter(templates.values()), None)
    is_trajectory = wanted.kind == "trajectory"
    return DatasetOrigin(
        owner=source.owner,
        name=source.name,
        purpose="train" if is_run else "evaluate",
        kind=wanted.kind,
        first_step=first if is_run else 0,
        last_step=last if is_run else 0,
        position=str(position),
        min_reward=wanted.min_reward,
        max_reward=wanted.max_reward,
        dedupe=wanted.dedupe,
        best_of_group=wanted.best_of_group,
        limit=wanted.limit,
        reward_margin=wanted.reward_margin,
        model=source.model if is_trajectory else None,
        temperature=sampled.params.temperature if sampled and is_trajectory else None,
        oldest_version=min(maker.versions, default=None),
        newest_version=max(maker.versions, default=None),
        num_samples=next(iter(maker.group_sizes)) if len(maker.group_sizes) == 1 else None,
    )


def _batch_of(content: bytes, ref: ArtifactRef) -> SampleBatch:
    try:
        return SampleBatch.model_validate_json(content)
    except ValidationError as error:
        raise CorruptData(f"{ref.uri} does not hold samples: {error}") from error
