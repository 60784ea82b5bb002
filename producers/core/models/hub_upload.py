"""Requests uploads of checkpoints to a model hub: checks what can be checked at once, writes the model
card, and appends the request to the log."""

import asyncio
import re
from dataclasses import dataclass
from uuid import UUID

from infra.blobs.hub.uploads import check_endpoint
from infra.ports.secrets import SecretStore
from infra.readmodel.runs import Runs
from infra.spine.ports.event_log import Cursor, EventStore
from producers.core.lookup import Checkpoint, Lookup
from producers.core.models.hub import hub_licence
from producers.core.models.model_card import CURVES, CardFacts, model_card
from schemas.deployments import REPOSITORY, HubForm, HubUpload
from schemas.errors import Conflict, InvalidConfig, Issue, NotFound
from schemas.events import (
    HubUploadCancelRequested,
    HubUploaded,
    HubUploadFailed,
    HubUploadRequested,
)
from schemas.ids import hub_stream, short_id
from schemas.secrets.rules import check_secret_name, how_to_set

HELD_OUT = "eval/validation/reward"
TOKEN = "HF_TOKEN"  # noqa: S105 - the name of a secret, not its value
ADAPTER = "adapter_config.json"

SEED = "hub-push"
"""The seed of the ids of uploads and of their requests. It is the word of earlier releases, so that a
request that is repeated after an upgrade still names the same upload."""


@dataclass(frozen=True, slots=True)
class WantedUpload:
    """An upload that a user asked for. `submitter` owns the personal secrets that may be used."""

    ref: str
    repository: str
    merged: bool = False
    private: bool = True
    secret: str = TOKEN
    submitter: str | None = None


class HubUploadRequests:
    """Requests uploads."""

    def __init__(
        self, log: EventStore, lookup: Lookup, runs: Runs, secrets: SecretStore, *, endpoint: str
    ) -> None:
        """`endpoint` is the address of the hub."""
        self._log = log
        self._lookup = lookup
        self._runs = runs
        self._secrets = secrets
        self._endpoint = endpoint

    async def request(self, asked: WantedUpload, *, cause: UUID) -> tuple[HubUpload, Cursor]:
        """Request an upload. The same cause gives the same upload. Raises NotFound and InvalidConfig."""
        check_endpoint(self._endpoint)
        checkpoint = await self._lookup.checkpoint(asked.ref)
        _check_names(asked)
        form = _form(checkpoint, merged=asked.merged)
        workspace = checkpoint.run.owner_workspace
        missing = await self._secrets.missing(
            (asked.secret,), workspace=workspace, submitter=asked.submitter
        )
        if missing:
            message = how_to_set(missing, pushed=False)
            raise InvalidConfig(message, issues=(Issue("secret", message),))
        upload = HubUpload(
            upload=short_id(SEED, str(cause)),
            run=checkpoint.run.run,
            run_name=checkpoint.run.run_name,
            step=checkpoint.spec.step,
            repository=asked.repository,
            form=form,
            private=asked.private,
            card=await self._card(checkpoint, asked, form),
            secret=asked.secret,
            workspace=workspace,
            submitter=asked.submitter,
        )
        recorded = await self._log.append([HubUploadRequested(upload=upload)], cause=cause)
        return upload, recorded[-1].cursor

    async def cancel(self, ref: str, *, upload: str, cause: UUID) -> tuple[HubUpload, Cursor]:
        """Give up an upload of a checkpoint. Raises NotFound, and Conflict when it has ended."""
        checkpoint = await self._lookup.checkpoint(ref)
        stream = hub_stream(upload)
        events = [recorded.event for recorded in (await self._log.load({stream: 0}))[stream]]
        asked = next(
            (event.upload for event in events if isinstance(event, HubUploadRequested)), None
        )
        place = (checkpoint.run.run, checkpoint.spec.step)
        if asked is None or (asked.run, asked.step) != place:
            raise NotFound(
                f"{checkpoint.ref} has no upload {upload[:80]!r}; `headrace checkpoint list` shows them"
            )
        for event in events:
            if isinstance(event, HubUploaded | HubUploadFailed):
                how = "succeeded" if isinstance(event, HubUploaded) else "failed"
                raise Conflict(f"the upload of {asked.ref} to {asked.repository} has already {how}")
        recorded = await self._log.append([HubUploadCancelRequested(upload=asked)], cause=cause)
        return asked, recorded[-1].cursor

    async def _card(self, checkpoint: Checkpoint, asked: WantedUpload, form: HubForm) -> str:
        run, model = checkpoint.run.run, checkpoint.spec.model
        curves = {key: await self._runs.curve(run, key) for key, _ in CURVES}
        found = await self._runs.get_run(run)
        held_out = dict(curves[HELD_OUT]).get(checkpoint.spec.step)
        facts = CardFacts(
            repository=asked.repository,
            form=form,
            private=asked.private,
            curves=curves,
            licence=await hub_licence(model.name) if model.kind == "hub" else None,
            held_out=held_out,
            commit=found[0]["commit_sha"] if found else None,
        )
        return await asyncio.to_thread(model_card, checkpoint, facts)


def _check_names(asked: WantedUpload) -> None:
    """Raise InvalidConfig for a name that no hub or secret has."""
    name = asked.repository
    if not re.fullmatch(REPOSITORY, name) or ".." in name or "--" in name or name.endswith(".git"):
        message = (
            f"{name[:200]!r} is not the name of a repository; write ORG/NAME with letters, digits, - _ "
            "and ., for example my-org/sums-lora"
        )
        raise InvalidConfig(message, issues=(Issue("repository", message),))
    check_secret_name(asked.secret)


def _form(checkpoint: Checkpoint, *, merged: bool) -> HubForm:
    if ADAPTER not in checkpoint.files():
        return "model"
    if merged and checkpoint.is_reward_model:
        message = (
            f"{checkpoint.ref} is a reward model, whose head is a part of its adapter and of no merged "
            "model; upload the adapter, without merged"
        )
        raise InvalidConfig(message, issues=(Issue("merged", message),))
    return "merged" if merged else "adapter"
