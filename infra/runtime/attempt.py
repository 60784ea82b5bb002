"""One attempt at an effect: call `perform` under a deadline and classify how it ended.

What the user's code, data or request got wrong is an outcome, `Failed`; what the outside did not
answer is tried again later; only then does it become `Failed` too. So the *run* always sees an event.
"""

import asyncio
import logging
import random
from dataclasses import dataclass, replace

from infra.ports.effects import Claimed
from infra.ports.event_log import SmallArtifact
from infra.ports.ports import Ports
from infra.postgres.errors import DatabaseUnavailable
from infra.runtime.consumer import AnyConsumer
from schemas.effects import Failed, Outcome
from schemas.errors import (
    CorruptData,
    FailureCategory,
    Refused,
    ReplayDiverged,
    RepositoryAway,
    StoreAway,
    UserCodeError,
)
from schemas.text import plain, said

logger = logging.getLogger(__name__)

ATTEMPTS = 5
"""Attempts at an effect whose outside does not answer, before it fails."""

STORE_PAUSE_S = 3.0
"""About how long work waits before it asks a store of blobs that was away again. It waits for ever: a
run must not end because a disk was full over night."""

DEADLINE_S = 6 * 3600.0
"""The longest an attempt may take; user code has its own, shorter deadlines."""


@dataclass(frozen=True, slots=True)
class Performing:
    """How an attempt ended: with an outcome, or (None) to be tried again in `retry_in_s`; or it did not
    end at all, because the database was `away`. Not `counted`: it was no fault of the attempt."""

    claimed: Claimed
    outcome: Outcome | None
    retry_in_s: float = 0.0
    error: str | None = None
    artifacts: tuple[SmallArtifact, ...] = ()
    seconds: float = 0.0
    traceparent: str | None = None
    away: bool = False
    counted: bool = True


async def perform_once(consumer: AnyConsumer, claimed: Claimed, ports: Ports) -> Performing:
    """Perform a claimed effect once. Never raises but CancelledError."""
    if claimed.spent:
        message = f"its worker died {claimed.crashes} times while performing it"
        return Performing(claimed, Failed(claimed.effect, FailureCategory.CRASH, message))
    assert consumer.perform is not None, consumer.name  # noqa: S101 - the registry is wrong
    try:
        async with asyncio.timeout(DEADLINE_S):
            outcome = await consumer.perform(claimed.effect, ports)
    except DatabaseUnavailable as error:
        return Performing(claimed, None, error=plain(str(error)), away=True)
    except StoreAway as error:
        logger.warning("%s waits: %s", claimed.effect.type, error)
        pause_s = random.uniform(0.5, 1.5) * STORE_PAUSE_S  # noqa: S311 - jitter
        return Performing(claimed, None, retry_in_s=pause_s, error=str(error), counted=False)
    except RepositoryAway as error:
        logger.warning("%s waits: %s", claimed.effect.type, error)
        pause_s = random.uniform(0.5, 1.0) * error.pause_s  # noqa: S311 - jitter
        return Performing(claimed, None, retry_in_s=pause_s, error=str(error), counted=False)
    except UserCodeError as error:
        return _failed(claimed, error.category, error.message)
    except Refused as error:
        issues = tuple(replace(issue, message=plain(issue.message)) for issue in error.issues)
        message = plain(error.message)
        failed = Failed(claimed.effect, FailureCategory.VALIDATION, message, issues=issues)
        return Performing(claimed, failed)
    except CorruptData as error:
        return _failed(claimed, FailureCategory.INTERNAL, str(error))
    except ReplayDiverged as error:
        return _failed(claimed, FailureCategory.REPLAY_DIVERGED, str(error))
    except Exception as error:
        return _again(claimed, error)
    return Performing(claimed, outcome)


def _failed(claimed: Claimed, category: FailureCategory, message: str) -> Performing:
    return Performing(claimed, Failed(claimed.effect, category, plain(message)))


def _again(claimed: Claimed, error: Exception) -> Performing:
    """Not our day: try again later, or give up with the error as the outcome."""
    text = said(error)
    logger.warning(
        "%s attempt %d: %s", claimed.effect.type, claimed.attempts + 1, text, exc_info=error
    )
    if claimed.attempts + 1 >= ATTEMPTS:
        return _failed(claimed, FailureCategory.INTERNAL, text)
    return Performing(claimed, None, retry_in_s=0.2 * 4**claimed.attempts, error=text)
