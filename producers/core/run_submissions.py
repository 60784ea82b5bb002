"""The port `Submissions`: a push submits its run by the same door as `headrace train submit`.

The TOML is that of the pushed commit, and its repository is not trusted. Its size is checked before it
is parsed. The run may use only what its workspace may see.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable

from infra.ports.actor import PUSH, Actor, acting_as
from infra.settings.sandbox_level import REFUSES_PUSHES, TRUSTED
from producers.core.submit import SubmitRequest, Submitter
from schemas.errors import InvalidConfig
from schemas.events import RunRequested
from schemas.specs import PushOrigin
from schemas.toml.overrides import apply_overrides
from schemas.toml.parser import parse_run
from schemas.toml.untrusted import read_untrusted_toml


class RunSubmissions:
    """Submits the runs of pushes. `level` says how user code is confined; one that trusts the authors of
    user code refuses them."""

    def __init__(
        self,
        submitter: Submitter,
        *,
        level: str,
        home_of: Callable[[str], Awaitable[str]],
    ) -> None:
        """`home_of` returns the organisation (id) of a workspace (id)."""
        self._submitter = submitter
        self._home_of = home_of
        self._level = level

    async def submit(self, origin: PushOrigin, config: bytes) -> str:
        """Submit the run of a push and a trigger, with the TOML `config` of the pushed commit. Returns
        the run's name. Submitting again returns the same name. Raises Refused when the run is refused,
        with all issues."""
        if self._level == TRUSTED:
            raise InvalidConfig(REFUSES_PUSHES)
        match = origin.match
        parsed = await asyncio.to_thread(read_untrusted_toml, config, match.config)
        document = apply_overrides(parsed, json.loads(match.overrides))
        parse_run(document)  # JSON, which identifies the request, has no dates
        request = SubmitRequest(
            config=document,
            workspace=origin.push.workspace,
            name=match.run_name,
            origin=origin,
        )
        workspace = origin.push.workspace
        author = Actor(
            PUSH,
            "push",
            frozenset(),
            workspace=workspace,
            organisation=await self._home_of(workspace),
        )
        with acting_as(author):
            recorded = await self._submitter.submit_run(request, key=origin.key)
        if not isinstance(recorded.event, RunRequested):
            raise AssertionError(f"run {origin.run} begins with {recorded.event.type}")
        return recorded.event.run_name
