"""Strangers who begin more sign-ins and device logins than may wait: they keep nobody out."""

import pytest

from infra.identity import device_logins
from infra.identity.device_logins import Approval, DeviceLoginStore
from infra.identity.oidc import attempts
from infra.identity.oidc.attempts import Attempts
from infra.spine.postgres.pool import Database

pytestmark = pytest.mark.postgres

MOST = 3


async def test_a_sign_in_begins_beside_a_crowd_and_takes_the_place_of_the_oldest(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "MOST_OPEN", MOST)
    store = Attempts(database)
    begun = [await store.begin(f"/{number}") for number in range(MOST + 2)]
    taken = [await store.take(one.state, one.secret) for one in begun]
    assert [one is not None for one in taken] == [False, False, True, True, True]


async def test_a_device_login_begins_beside_a_crowd_and_an_approved_one_stays(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_logins, "MOST_WAITING", MOST)
    store = DeviceLoginStore(database)

    async def begin() -> device_logins.Codes:
        return await store.begin("laptop", "192.0.2.1", interval_s=5, lasts_s=600)

    approved = await begin()
    until = await database.durable.fetchval("select clock_timestamp() + interval '1 day'")
    await store.decide(approved.user, Approval("ada", "main", None, "key", until))
    begun = [await begin() for _ in range(MOST + 2)]
    found = [await store.find(one.user) for one in begun]
    assert [one is not None for one in found] == [False, False, True, True, True]
    assert await store.poll(approved.device, slower_s=5) is not None
