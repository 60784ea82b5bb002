"""Makes deliveries durable in groups: those that arrive while one commit runs share the next one."""

import asyncio
from collections import deque

from infra.failpoints import hit
from infra.spine.ports.event_log import EdgeAppend, EdgeAppended, EventStore
from schemas.errors import Refused

MOST_AT_ONCE = 500
"""The most deliveries in one commit."""

Waiting = tuple[EdgeAppend, "asyncio.Future[EdgeAppended]"]


class DeliveryJournal:
    """Appends deliveries to the log. The connections of the server bound how many wait."""

    def __init__(self, log: EventStore) -> None:
        self._log = log
        self._waiting: deque[Waiting] = deque()
        self._writing: asyncio.Task[None] | None = None

    async def record(self, entry: EdgeAppend) -> EdgeAppended:
        """Append a delivery, and return it once it is durable. Raises Refused when the log cannot hold
        it, and DatabaseUnavailable."""
        recorded: asyncio.Future[EdgeAppended] = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, recorded))
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write())
        return await recorded

    async def _write(self) -> None:
        """Write groups until nobody waits."""
        try:
            while self._waiting:
                count = min(len(self._waiting), MOST_AT_ONCE)
                await self._write_group([self._waiting.popleft() for _ in range(count)])
        finally:
            self._writing = None

    async def _write_group(self, group: list[Waiting]) -> None:
        """Write one group. Each sender learns what became of its own delivery."""
        try:
            hit("webhook.before_commit")
            answers = await self._log.append_all([entry for entry, _ in group])
            hit("webhook.after_commit")
        except BaseException as error:
            for _, recorded in group:
                if isinstance(error, Exception) and not recorded.done():
                    recorded.set_exception(error)
                recorded.cancel()
            if not isinstance(error, Exception):
                raise
            return
        for (_, recorded), answer in zip(group, answers, strict=True):
            if recorded.done():
                continue  # its sender has gone
            if isinstance(answer, Refused):
                recorded.set_exception(answer)
            else:
                recorded.set_result(answer)
