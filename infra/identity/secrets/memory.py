"""Secrets in memory. They pass the same contract suite as those on Postgres."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from infra.identity.secrets.store import too_many
from infra.ports.secrets import SecretOwner, StoredSecret
from schemas.secrets.rules import MOST_SECRETS, check_secret_name, check_secret_value
from schemas.secrets.secret_value import SecretValue

KEY = "memory"


@dataclass(frozen=True, slots=True)
class _Kept:
    stored: StoredSecret
    value: SecretValue


class MemorySecrets:
    """`infra.ports.secrets.SecretStore` in memory."""

    def __init__(self) -> None:
        self._kept: dict[tuple[SecretOwner, str], _Kept] = {}
        self._given: dict[str, Mapping[str, SecretValue]] = {}

    async def put_secret(
        self, owner: SecretOwner, name: str, value: SecretValue, *, by: str
    ) -> bool:
        check_secret_name(name)
        check_secret_value(value.reveal())
        now = datetime.now(UTC)
        former = self._kept.get((owner, name))
        if former is None and len(await self.all_secrets([owner])) >= MOST_SECRETS:
            raise too_many(owner)
        stored = (
            StoredSecret(owner, name, KEY, now, by, now, by, None)
            if former is None
            else replace(former.stored, updated_at=now, updated_by=by)
        )
        self._kept[owner, name] = _Kept(stored, value)
        return former is None

    async def all_secrets(self, owners: Sequence[SecretOwner]) -> Sequence[StoredSecret]:
        found = [kept.stored for (owner, _), kept in self._kept.items() if owner in owners]
        return sorted(found, key=lambda one: (one.owner.scope, one.owner.id, one.name))

    async def delete(self, owner: SecretOwner, name: str) -> bool:
        return self._kept.pop((owner, name), None) is not None

    async def missing(
        self, names: Sequence[str], *, workspace: str | None, submitter: str | None
    ) -> tuple[str, ...]:
        found = self._find(names, workspace, submitter)
        return tuple(name for name in names if name not in found)

    async def resolve(
        self,
        names: Sequence[str],
        *,
        workspace: str | None,
        submitter: str | None,
        run: str | None = None,
    ) -> Mapping[str, SecretValue]:
        given = self._given.get(run or "", {})
        own = {name: given[name] for name in names if name in given}
        names = [name for name in names if name not in own]
        found = self._find(names, workspace, submitter)
        for kept in found.values():
            stored = replace(kept.stored, used_at=datetime.now(UTC))
            self._kept[stored.owner, stored.name] = _Kept(stored, kept.value)
        return own | {name: kept.value for name, kept in found.items()}

    async def give(self, run: str, values: Mapping[str, SecretValue]) -> None:
        for name, value in values.items():
            check_secret_name(name)
            check_secret_value(value.reveal())
        self._given[run] = dict(values)

    async def take_back(self, run: str) -> None:
        self._given.pop(run, None)

    def _find(
        self, names: Sequence[str], workspace: str | None, submitter: str | None
    ) -> dict[str, _Kept]:
        owners = [SecretOwner("workspace", workspace)] if workspace else []
        owners += [SecretOwner("personal", submitter)] if submitter else []
        return {
            name: self._kept[owner, name]
            for owner in owners
            for name in names
            if (owner, name) in self._kept
        }
