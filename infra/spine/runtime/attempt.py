"""One attempt at an effect: call `perform` under a deadline and classify how it ended.

An error in the user's code, data or request is an outcome, `Failed`. When an external service does not
answer, the attempt is repeated later, and after the last attempt the outcome is `Failed` too. So the
*run* always sees an event.
"""

import asyncio
import logging
import random
from dataclasses import dataclass, replace

from infra.spine.ports.artifacts import SmallArtifact
from infra.spine.ports.effects import Claimed
from infra.spine.postgres.errors import DatabaseUnavailable
from infra.spine.runtime.consumer import AnyConsumer
from schemas.costs.work import Work
from schemas.effects.effect import Failed, Outcome
from schemas.errors import (
    CorruptData,
    FailureCategory,
    JudgeAway,
    Refused,
    ReplayDiverged,
    RepositoryAway,
    SamplerBusy,
    SandboxAway,
    StoreAway,
    TeacherAway,
    UserCodeError,
)
from schemas.text import describe_error, plain

logger = logging.getLogger(__name__)

ATTEMPTS = 5
"""Attempts at an effect whose outside does not answer, before it fails."""

STORE_PAUSE_S = 3.0
"""About how long an effect waits before it asks an unavailable blob store, sandbox service, judge,
teacher or sampler again. It waits without limit, because a run must not end when a disk was full
overnight."""

MOST_DOUBLINGS = 30
"""How often a pause is doubled at most, whatever its limit, so that it stays a number."""

DEADLINE_S = 6 * 3600.0
"""The longest that an attempt may take. User code has its own, shorter deadlines."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """How an attempt ended. If `outcome` is None it is repeated in `retry_in_s` seconds. If the database
    was unavailable (`no_database`), it is repeated as soon as the effect is claimed again. `counted`
    says that it counts against ATTEMPTS. `work` is what it took of its device."""

    claimed: Claimed
    outcome: Outcome | None
    retry_in_s: float = 0.0
    error: str | None = None
    artifacts: tuple[SmallArtifact, ...] = ()
    seconds: float = 0.0
    work: Work | None = None
    traceparent: str | None = None
    no_database: bool = False
    counted: bool = True


async def perform_once(consumer: AnyConsumer, claimed: Claimed, ports: object) -> Attempt:
    """Perform a claimed effect once, and return how the attempt ended. Raises only CancelledError."""
    if claimed.spent:
        message = f"its worker died {claimed.crashes} times while performing it"
        return Attempt(claimed, Failed(claimed.effect, FailureCategory.CRASH, message))
    assert consumer.perform is not None, consumer.name  # noqa: S101 - the registry is wrong
    try:
        async with asyncio.timeout(DEADLINE_S):
            outcome = await consumer.perform(claimed.effect, ports)
    except DatabaseUnavailable as error:
        return Attempt(claimed, None, error=plain(str(error)), no_database=True)
    except (StoreAway, SandboxAway, JudgeAway, TeacherAway, SamplerBusy) as error:
        logger.warning("%s waits: %s", claimed.effect.type, error)
        pause_s = random.uniform(0.5, 1.5) * STORE_PAUSE_S  # noqa: S311 - jitter
        return Attempt(claimed, None, retry_in_s=pause_s, error=str(error), counted=False)
    except RepositoryAway as error:
        logger.warning("%s waits: %s", claimed.effect.type, error)
        pause_s = random.uniform(0.5, 1.0) * pause_after(error, claimed.epoch)  # noqa: S311 - jitter
        return Attempt(claimed, None, retry_in_s=pause_s, error=str(error), counted=False)
    except UserCodeError as error:
        return _failure(claimed, error.category, error.message)
    except Refused as error:
        issues = tuple(replace(issue, message=plain(issue.message)) for issue in error.issues)
        message = plain(error.message)
        failed = Failed(claimed.effect, FailureCategory.VALIDATION, message, issues=issues)
        return Attempt(claimed, failed)
    except CorruptData as error:
        return _failure(claimed, FailureCategory.INTERNAL, str(error))
    except ReplayDiverged as error:
        return _failure(claimed, FailureCategory.REPLAY_DIVERGED, str(error))
    except Exception as error:  # a consumer may have any bug
        return retry_or_fail(claimed, error)
    return Attempt(claimed, outcome)


def pause_after(error: RepositoryAway, tries: int) -> float:
    """Seconds to wait before an effect is tried again that was claimed so often."""
    if error.longest_pause_s is None:
        return error.pause_s
    doublings = min(max(0, tries - 1), MOST_DOUBLINGS)
    return max(error.pause_s, min(error.pause_s * 2.0**doublings, error.longest_pause_s))


def retry_or_fail(claimed: Claimed, error: Exception) -> Attempt:
    """Retry with back-off. After the last attempt, report the error as the outcome."""
    text = describe_error(error)
    logger.warning(
        "%s attempt %d: %s", claimed.effect.type, claimed.attempts + 1, text, exc_info=error
    )
    if claimed.attempts + 1 >= ATTEMPTS:
        return _failure(claimed, FailureCategory.INTERNAL, text)
    return Attempt(claimed, None, retry_in_s=0.2 * 4**claimed.attempts, error=text)


def _failure(claimed: Claimed, category: FailureCategory, message: str) -> Attempt:
    return Attempt(claimed, Failed(claimed.effect, category, plain(message)))
