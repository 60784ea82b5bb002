"""Rename, delete, archive and restore runs, and delete datasets.

Names are labels, so renaming changes no id. A deletion is refused while something needs what would
be deleted, and the error names it. Archiving moves the history of an ended run into one file. Its
request and its checkpoints stay, so that everything that refers to them still works
(docs/retention.md).
"""

import logging
from datetime import timedelta
from uuid import UUID

from infra.names import Names
from infra.operations.maintenance.archive import Archives, Moved
from infra.operations.maintenance.dependents import Holders
from infra.operations.maintenance.records import EVALUATIONS, OTHERS, Records
from infra.ports.actor import may_change_shared, may_see
from infra.readmodel.runs import RunJson
from infra.readmodel.store import ReadModel
from infra.spine.ports.appender import APPENDER
from infra.spine.ports.clock import Clock
from infra.spine.ports.event_log import Commit, CommitMiss, Cursor, EventLog, NewEvent, Recorded
from infra.spine.postgres.codec import edge_ids
from producers.core.datasets.registration import registration
from producers.core.datasets.versions import (
    DatasetVersion,
    load_versions,
    name_of_version,
    split_version,
)
from producers.core.lookup import Lookup
from producers.core.run_names import require_name, used_name_error
from schemas.errors import Conflict, HeadraceError, NotFound, TransientError
from schemas.events import (
    DatasetDeleted,
    RunArchived,
    RunDeleted,
    RunRenamed,
    RunRequested,
    RunRestored,
)
from schemas.ids import HEADRACE, derive_id, run_stream

logger = logging.getLogger(__name__)

ENDED = ("finished", "failed", "crashed", "stopped", "killed")
EVERY_S = 3600.0
"""How often the server looks for runs that are old enough."""


class Retention:
    """Renames, deletes, archives and restores. All methods raise NotFound. Those that remove something
    raise Conflict when it is still needed, and the error names what needs it."""

    def __init__(
        self,
        log: EventLog,
        names: Names,
        *,
        lookup: Lookup,
        readmodel: ReadModel,
        archives: Archives,
        records: Records,
        holders: Holders,
    ) -> None:
        self._log = log
        self._names = names
        self._lookup = lookup
        self._tables = readmodel
        self._archives = archives
        self._records = records
        self._holders = holders

    async def rename(self, ref: str, name: str, *, cause: UUID) -> tuple[str, Cursor]:
        """Give a run another name. The former name can be used again. Raises InvalidConfig, Conflict."""
        require_name("run", name)
        found = await self._lookup.whole_run(ref)
        if found.run_name == name:
            return found.run, Cursor()
        scope = found.owner_workspace or ""
        if await self._names.take("run", name, found.run, scope=scope) != found.run:
            raise used_name_error("run", name)
        recorded = await self._append_rename(RunRenamed(run=found.run, run_name=name), cause)
        await self._names.release("run", found.run_name, found.run)
        return found.run, recorded.cursor

    async def delete(self, ref: str) -> tuple[str, Cursor]:
        """Delete an ended run: its events, its checkpoints, its archive if it has one, and its name."""
        found = await self._lookup.run(ref)
        await self._refuse_unless_ended(found.run, found.run_name)
        what = f"run {found.run_name}"
        if runs := await self._holders.runs_from(found.run):
            raise _in_use_error(what, "need its checkpoints", "delete them first", runs)
        if forks := await self._holders.forks_of(found.run, archived=True):
            raise _in_use_error(what, "are forks of it", "delete them first", forks)
        if evaluations := await self._holders.evaluations_of(found.run):
            raise _in_use_error(
                what, "measure its checkpoints", "wait for them or stop them", evaluations
            )
        if deployed := await self._holders.deployments_of(found.run):
            raise _in_use_error(what, "serve its checkpoints", "undeploy them first", deployed)
        cause = derive_id(HEADRACE, f"delete/{found.run}")
        try:
            cursor = await self._archives.remove(RunDeleted(run=found.run), cause=cause)
        except Moved:
            return found.run, Cursor()  # another request deleted it meanwhile
        return found.run, cursor

    async def archive(self, ref: str) -> tuple[str, Cursor]:
        """Move an ended run's history into an archive. A run that is archived already is not changed.
        Raises CorruptData when an artifact is damaged, and TransientError when the blob store does not
        answer."""
        found = await self._lookup.run(ref)
        row = await self._refuse_unless_ended(found.run, found.run_name)
        if row["archived_at"] is not None:
            return found.run, Cursor()
        if forks := await self._holders.forks_of(found.run, archived=False):
            raise Conflict(
                f"run {found.run_name} cannot be archived, because the states of its forks begin with "
                f"its history: {', '.join(forks)}; archive or delete them first"
            )
        packed = await self._archives.pack(found.run)
        # Read after packing, so that the notice describes the run as all packed events left it.
        await self._tables.caught_up(await self._log.visible_head())
        row = await self._refuse_unless_ended(found.run, found.run_name)
        if row["archived_at"] is not None:
            return found.run, Cursor()
        notice = RunArchived(
            run=found.run,
            archive=packed.ref,
            num_events=packed.num_events,
            num_artifacts=packed.num_artifacts,
            run_name=row["name"],
            status=row["status"],
            phase=row["phase"],
            commit=row["commit_sha"],
            current_step=row["current_step"],
            total_steps=row["total_steps"],
            reward=row["reward"],
            error=row["error"],
            started_at=row["started_at"],
            completed_at=row["completed_at"],
            costs=await self._tables.costs.summary(found.run),
        )
        cause = derive_id(HEADRACE, f"archive/{found.run}/{packed.ref.sha256}")
        try:
            cursor = await self._archives.remove(notice, cause=cause, num_events=packed.num_events)
        except Moved as error:
            if await self._notice(found.run) is None:
                raise TransientError(
                    f"run {found.run_name} got new events while it was archived; try again"
                ) from error
            return found.run, Cursor()  # another request archived it meanwhile
        return found.run, cursor

    async def restore(self, ref: str) -> tuple[str, Cursor]:
        """Restore an archived run's history. Raises CorruptData when the archive is damaged, and
        TransientError when the blob store does not answer."""
        found = await self._lookup.run(ref)
        notice = await self._notice(found.run)
        if notice is None:
            raise Conflict(
                f"run {found.run_name} is not archived, so it cannot be restored; `headrace train "
                "archive` archives runs"
            )
        await self._refuse_without_parent(found)
        back = RunRestored(
            run=found.run, archive_sha256=notice.archive.sha256, num_events=notice.num_events
        )
        cause = derive_id(HEADRACE, f"restore/{found.run}/{notice.archive.sha256}")
        try:
            cursor = await self._archives.restore(notice.archive, back, cause=cause)
        except Moved:
            return found.run, Cursor()  # another request restored it meanwhile
        return found.run, cursor

    async def _refuse_without_parent(self, found: RunRequested) -> None:
        if found.fork is None or await self._notice(found.fork.parent) is None:
            return
        parent = (await self._lookup.run(found.fork.parent)).run_name
        raise Conflict(
            f"run {found.run_name} is a fork of {parent}, which is archived; restore that first: "
            f"`headrace train restore {parent}`"
        )

    async def delete_dataset(self, ref: str) -> tuple[str, Cursor]:
        """Delete a dataset with all of its versions; or one version, by its id or as NAME@VERSION; or an
        upload that was rejected or never completed."""
        try:
            _, event = await registration(self._log, self._names, ref)
        except NotFound:
            upload = await self._tables.registry.dataset(ref)
            if (
                upload is None
                or upload["status"] == "uploaded"
                or not _may_change(upload["workspace"], upload["organisation"])
            ):
                raise
            await self._tables.uploads.forget(upload["id"])
            return upload["id"], Cursor()
        if not _may_change(event.workspace, event.organisation):
            raise Conflict(
                f"dataset {event.dataset.name} is shared; only an API key of all workspaces may "
                "delete it"
            )
        series = event.series or event.dataset.dataset
        versions = (await load_versions(self._log, series)).found
        is_one = split_version(ref)[1] or ref in [one.event.dataset.dataset for one in versions]
        doomed = [one for one in versions if not is_one or one.event.dataset == event.dataset]
        for version in doomed:
            await self._refuse_unless_unused(version)
        cursor = Cursor()
        for version in reversed(doomed):
            is_last = len(doomed) == len(versions) and version is doomed[0]
            cursor = max(cursor, await self._delete_version(version, series, is_last=is_last))
        return event.dataset.dataset, cursor

    async def _refuse_unless_unused(self, version: DatasetVersion) -> None:
        ref = version.event.dataset
        what = f"dataset {name_of_version(ref.name, ref.version)}"
        if runs := await self._holders.runs_on(ref.dataset):
            raise _in_use_error(
                what, "learn from it or are validated on it", "delete them first", runs
            )
        if evaluations := await self._holders.evaluations_on(ref.dataset):
            raise _in_use_error(what, "measure on it", "wait for them or stop them", evaluations)

    async def _delete_version(
        self, version: DatasetVersion, series: str, *, is_last: bool
    ) -> Cursor:
        event = version.event
        uris = sorted({event.dataset.content.uri, event.original.uri})
        cause = derive_id(version.recorded.id, "delete")
        notice = DatasetDeleted(dataset=event.dataset.dataset)
        try:
            return await self._archives.remove_dataset_version(
                notice, uris, series=series, is_last=is_last, cause=cause
            )
        except Moved:
            return Cursor()  # another request deleted it meanwhile

    async def delete_evaluation(self, ref: str) -> str:
        """Delete an evaluation that has ended, with its samples and its name."""
        asked = await self._lookup.evaluation(ref)
        if asked.run is not None:
            raise Conflict(f"evaluation {ref} validates run {asked.run}, and is deleted with it")
        found = await self._tables.evaluations.get_evaluation(asked.evaluation)
        if found is None:
            raise TransientError(f"evaluation {ref} is not in the read model yet; try again")
        if found["status"] not in ENDED:
            raise Conflict(
                f"evaluation {ref} is {found['status']}; let it end first, or `headrace eval stop {ref}`"
            )
        if not await self._records.remove_evaluation(asked.evaluation):
            raise TransientError(f"evaluation {ref} got new events; try again")
        return asked.evaluation

    async def remove_old_records(
        self, clock: Clock, *, evaluation_days: int | None, record_days: int | None
    ) -> dict[str, int]:
        """Remove the evaluations and the other records that are older than so many days. None keeps
        them. Returns how many of each kind were removed."""
        removed: dict[str, int] = {}
        for kinds, days in (((EVALUATIONS,), evaluation_days), (OTHERS, record_days)):
            if days is not None:
                before = clock.now() - timedelta(days=days)
                removed |= await self._records.remove(kinds, before=before)
        return removed

    async def archive_old(self, clock: Clock, *, older_than: timedelta) -> int:
        """Archive the runs that ended longer ago than `older_than`. Returns how many were archived. A
        run that cannot be archived now is logged and tried again next time."""
        count = 0
        for run in await self._tables.runs.ended_before(clock.now() - older_than):
            try:
                await self.archive(run["id"])
                count += 1
            except (HeadraceError, OSError) as error:
                logger.warning("run %s is not archived: %s", run["name"], error)
        return count

    async def _append_rename(self, event: RunRenamed, cause: UUID) -> Recorded:
        """Append the event, unless the run was archived meanwhile, because an archived run's stream
        gets no events."""
        [identity] = edge_ids([event], cause)
        while True:
            stream = run_stream(event.run)
            version = (await self._log.versions([stream]))[stream]
            await self._lookup.whole_run(event.run)
            new = NewEvent(
                id=identity,
                stream=stream,
                version=version + 1,
                event=event,
                causation=cause,
                correlation=cause,
                actor=APPENDER.get(),
            )
            try:
                [recorded] = await self._log.commit(
                    Commit(expected={stream: version}, events=(new,))
                )
            except CommitMiss:
                continue
            return recorded

    async def _refuse_unless_ended(self, run: str, name: str) -> RunJson:
        found = await self._tables.runs.get_run(run)
        if found is None or found[0]["id"] != run:
            raise TransientError(f"run {name} is not in the read model yet; try again")
        row, _ = found
        if row["status"] not in ENDED:
            raise Conflict(
                f"run {name} is {row['status']}; let it end first, or `headrace train stop {name}`"
            )
        return row

    async def _notice(self, run: str) -> RunArchived | None:
        types = [RunArchived.type]
        for recorded in await self._log.read(run, after=Cursor(), limit=1, types=types):
            if isinstance(recorded.event, RunArchived):
                return recorded.event
        return None


async def archive_periodically(retention: Retention, clock: Clock, *, days: int) -> None:
    """Archive the runs that ended more than `days` days ago, at once and then every EVERY_S seconds,
    until cancelled."""
    while True:
        try:
            count = await retention.archive_old(clock, older_than=timedelta(days=days))
            if count:
                logger.info("%d runs that ended more than %d days ago are archived", count, days)
        except (HeadraceError, OSError) as error:
            logger.warning("old runs are archived the next time: %s", error)
        await clock.sleep(EVERY_S)


async def remove_records_periodically(
    retention: Retention, clock: Clock, *, evaluation_days: int | None, record_days: int | None
) -> None:
    """Remove old records at once and then every EVERY_S seconds, until cancelled."""
    while True:
        try:
            removed = await retention.remove_old_records(
                clock, evaluation_days=evaluation_days, record_days=record_days
            )
            if any(removed.values()):
                told = ", ".join(f"{count} {kind}" for kind, count in removed.items() if count)
                logger.info("old records are removed: %s", told)
        except (HeadraceError, OSError) as error:
            logger.warning("old records are removed the next time: %s", error)
        await clock.sleep(EVERY_S)


def _may_change(workspace: str | None, organisation: str | None) -> bool:
    """Whether this task may delete a dataset of a workspace, or a shared one of an organisation."""
    return may_change_shared(organisation) if workspace is None else may_see(workspace)


def _in_use_error(what: str, why: str, hint: str, holders: list[str]) -> Conflict:
    listed = ", ".join(holders)
    return Conflict(f"{what} cannot be deleted, because these {why}: {listed}; {hint}")
