"""Makes calls of user code again whose process ended during the call."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from schemas.errors import CallInterrupted

logger = logging.getLogger(__name__)

T = TypeVar("T")

PAUSES_S = (0.2, 0.8, 3.2)
"""The pauses before a call is made again. Then a sandbox has seen it end its process often enough."""


async def until_uninterrupted(attempt: Callable[[], Awaitable[T]]) -> T:
    """Make an attempt at a call, and make it again while its process ends during it. All attempts are
    made by one worker: its sandbox counts them, and says after the last one that the call ends its
    process. Raises what the attempt raises."""
    for pause_s in PAUSES_S:
        try:
            return await attempt()
        except CallInterrupted as error:
            logger.warning("%s", error)
            await asyncio.sleep(pause_s)
    return await attempt()
