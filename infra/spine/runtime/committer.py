"""The only way to commit. Everything that this process decides is written here, one commit at a time:
deliveries that become ready while a commit is under way share the next one."""

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import replace

from infra import failpoints, telemetry
from infra.spine.ports.clock import LogTime
from infra.spine.ports.effects import Claimed
from infra.spine.ports.event_log import Commit, CommitMiss, CommitRefused, EventLog
from infra.spine.postgres.codec import Unwritable
from infra.spine.postgres.errors import DatabaseUnavailable
from infra.spine.postgres.history import as_of
from infra.spine.runtime.cascade import DecisionError, Delivery, Draft, Drafter, DraftRefused
from infra.spine.runtime.claims import Claims
from infra.spine.runtime.folded_states import StateCache
from infra.spine.runtime.newer_runs import NewerRuns
from infra.spine.runtime.performer import Performer
from infra.spine.runtime.quarantine import DeliveryBatch, Quarantine
from infra.task_cancellation import go_on
from schemas.ids import WorkerId

logger = logging.getLogger(__name__)

DATABASE_PAUSE_S = 0.2
"""The pause before an unavailable database is asked again."""

Problem = DecisionError | CommitMiss | DraftRefused
"""Why a batch was not written, and what to examine before it is tried again."""


class Committer:
    """Decides on deliveries and writes the decisions. `commits` counts the commits that were written."""

    def __init__(
        self,
        worker: WorkerId,
        *,
        log: EventLog,
        time: LogTime,
        states: StateCache,
        drafter: Drafter,
        quarantine: Quarantine,
        newer_runs: NewerRuns,
        claims: Claims,
        performer: Performer,
    ) -> None:
        self._worker = worker
        self._log = log
        self._time = time
        self._states = states
        self._drafter = drafter
        self._quarantine = quarantine
        self._newer_runs = newer_runs
        self._claims = claims
        self._performer = performer
        self._history_epoch = log.history_epoch
        self.commits = 0

    async def commit(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """Decide on these deliveries and write the decisions, under a span that links to theirs, and to
        which everything that follows links. Returns once each is written or put aside, with those that
        are left for a newer release."""
        if not deliveries:
            return ()
        names = "+".join(dict.fromkeys(delivery.consumer.name for delivery in deliveries))
        links = [delivery.traceparent for delivery in deliveries]
        with telemetry.span(telemetry.DECIDE.format(consumers=names), links=links) as context:
            if context is not None:
                deliveries = [replace(delivery, traceparent=context) for delivery in deliveries]
            async with self._claims.changing:
                left = await self._commit_all(DeliveryBatch(deliveries))
                self._claims.drop_reservations()
        return left

    async def _commit_all(self, batch: DeliveryBatch) -> Sequence[Delivery]:
        """Decide and write. After a miss, read again, without a limit on the number of tries. While the
        database is unavailable, wait. Writing again then shows whether the last write succeeded. Returns
        what is left for a newer release."""
        tries = 0
        left: list[Delivery] = []
        batches = [batch]
        problem: Problem | None = None
        while batches:
            go_on()
            try:
                if problem is None:
                    await self._write(batches[0])
                    del batches[0]
                    continue
                remaining = await self._remaining_after(problem, batches[0])
                if isinstance(problem, DecisionError) and problem.newer:
                    left += [d for d in batches[0].deliveries if d is problem.delivery]
                batches[:1] = [each for each in remaining if each.deliveries]
                problem = None
            except (DecisionError, CommitMiss, DraftRefused) as error:
                problem = error
            except DatabaseUnavailable as error:
                self._claims.distrust()
                logger.warning("a decision waits for the database: %s", error)
                await asyncio.sleep(DATABASE_PAUSE_S)
            tries += 1
            await asyncio.sleep(random.uniform(0, min(0.05, 0.001 * 2 ** min(tries, 6))))  # noqa: S311 - jitter
        return left

    async def _write(self, batch: DeliveryBatch) -> None:
        """Decide on a batch and write it. Raises DecisionError, DraftRefused, CommitMiss and
        DatabaseUnavailable."""
        self._claims.drop_reservations()
        self._forget_other_history()
        # 2-4 decided: read, fold, handle, cascade (`cascade.py`)
        with as_of(self._history_epoch):
            draft = await self._drafter.draft(batch.deliveries, left_to_bus=batch.left_to_bus)
        self._hit_failpoints(draft, "decided")
        self._hit_failpoints(draft, "tx_before_commit")
        # 5 commit: one call, whole or not at all
        commit = draft.commit(self._worker)
        try:
            with as_of(self._history_epoch):
                recorded = await self._log.commit(commit)
        except Unwritable as error:
            raise draft.blame_author(error) from error
        except CommitRefused as error:
            self._states.forget(draft.states)
            raise draft.blame_all(error) from error
        except (CommitMiss, DatabaseUnavailable):
            self._states.forget(draft.states)
            raise
        self._hit_failpoints(draft, "tx_after_commit")
        if recorded:
            self._time.observe(recorded[-1].time)
        self._apply(draft, commit)
        await self._states.save_snapshots(draft.owners)

    def _forget_other_history(self) -> None:
        """Forget all cached states if the database has another history, for example after a restore."""
        if self._history_epoch != self._log.history_epoch:
            self._states.clear()
            self._newer_runs.clear()
            self._history_epoch = self._log.history_epoch
            self._claims.distrust()

    def _apply(self, draft: Draft, commit: Commit) -> None:
        """Apply a written draft to the states and claims of this process."""
        self.commits += 1
        self._states.remember(draft.states)
        born_claimed = [new for new in draft.effects if new.claimed]
        for new in born_claimed:
            self._performer.start(Claimed.from_new(new))
        self._claims.drop_reservations(held=[new.effect for new in born_claimed])
        if commit.may_bring_claims:
            self._performer.wake()

    async def _remaining_after(
        self, problem: Problem, batch: DeliveryBatch
    ) -> Sequence[DeliveryBatch]:
        """Return the batches that remain to be decided after a problem, with what is left to the bus."""
        deliveries, left_to_bus = batch
        if isinstance(problem, CommitMiss):
            return [DeliveryBatch(await self._still_to_decide(deliveries, problem), left_to_bus)]
        if isinstance(problem, DraftRefused):
            return await self._quarantine.split_refused(batch, problem)
        culprit = problem.delivery
        if culprit.id not in {delivery.id for delivery in deliveries}:
            # The culprit came from the cascade, so let the bus deliver it separately.
            return [DeliveryBatch(deliveries, left_to_bus | {culprit.key})]
        if problem.newer:
            await self._quarantine.leave(culprit, problem)
            others = [delivery for delivery in deliveries if delivery is not culprit]
            return [DeliveryBatch(others, left_to_bus)]
        remaining = await self._quarantine.isolate(deliveries, problem)
        return [DeliveryBatch(each, left_to_bus) for each in remaining]

    async def _still_to_decide(
        self, deliveries: Sequence[Delivery], miss: CommitMiss
    ) -> Sequence[Delivery]:
        """Return the deliveries that remain after a miss: not consumed elsewhere, and not fenced."""
        brought = [(d.consumer.name, d.brought_by) for d in deliveries if d.brought_by]
        unconsumed = await self._log.unconsumed(brought)
        to_consume = {(name, recorded.id) for name, recorded in unconsumed}
        fenced = miss.what if miss.kind == "fenced" else None
        if fenced is not None:
            self._claims.distrust()
        return [
            d
            for d in deliveries
            if (d.brought_by is None or (d.consumer.name, d.brought_by.id) in to_consume)
            and not (d.claimed and str(d.claimed.id) == fenced)
        ]

    def _hit_failpoints(self, draft: Draft, step: str) -> None:
        """Hit the failpoints of every consumer in this commit."""
        for name in draft.event_consumers:
            failpoints.hit(f"{name}.intake.{step}")
        if step == "decided":
            return
        for name, effect_type in draft.effects_performed:
            failpoints.hit(f"{name}.perform.{effect_type}.{step}")
