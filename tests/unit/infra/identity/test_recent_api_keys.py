"""What a process knows of API keys: how often it asks the database, and when it forgets."""

from dataclasses import replace
from datetime import timedelta

import pytest

from infra.identity.api_key_format import IssuedApiKey, issue_api_key
from infra.identity.api_keys import ApiKey
from infra.identity.recent_api_keys import KEPT_S, STALE_S, USED_S, RecentApiKeys
from infra.spine.ports.clock import ManualClock
from infra.spine.postgres.errors import DatabaseUnavailable
from schemas.errors import TransientError


class Source:
    """A table of API keys that counts how often it is asked."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.api_keys: dict[str, ApiKey] = {}
        self.marks = self.reads = 0
        self.is_away = False

    def add(self, issued: IssuedApiKey) -> None:
        self.api_keys[issued.id] = ApiKey(
            id=issued.id,
            name="t",
            owner="ada",
            prefix=issued.prefix,
            sha256=issued.sha256,
            scopes=frozenset({"read"}),
            workspace=None,
            expires_at=None,
            created_at=self.clock.now(),
            created_by="root",
            last_used_at=None,
            revoked_at=None,
        )

    async def mark(self) -> str:
        if self.is_away:
            raise DatabaseUnavailable("away")
        self.marks += 1
        revoked = sum(api_key.revoked_at is not None for api_key in self.api_keys.values())
        return f"{len(self.api_keys)}/{revoked}"

    async def read_all(self) -> list[ApiKey]:
        self.reads += 1
        return list(self.api_keys.values())


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def source(clock: ManualClock) -> Source:
    return Source(clock)


async def test_an_api_key_is_found_and_the_table_is_read_once(
    source: Source, clock: ManualClock
) -> None:
    issued = issue_api_key()
    source.add(issued)
    recent = RecentApiKeys(source, clock)
    for _ in range(1000):
        found = await recent.find(issued.text)
        assert found is not None
        assert found.owner == "ada"
    assert (source.marks, source.reads) == (1, 1)


async def test_a_flood_of_unknown_api_keys_asks_four_times_a_second(
    source: Source, clock: ManualClock
) -> None:
    recent = RecentApiKeys(source, clock)
    flood = [issue_api_key().text for _ in range(500)]
    for number in range(10_000):
        assert await recent.find(flood[number % 500]) is None
        clock.advance(0.0001)
    assert source.marks <= 5
    assert source.reads == 1


async def test_a_text_without_the_checksum_asks_nothing(source: Source, clock: ManualClock) -> None:
    recent = RecentApiKeys(source, clock)
    assert await recent.find("hr_aaaaaaaaaa_" + "x" * 49) is None
    assert source.marks == 0


async def test_another_secret_under_a_known_id_is_refused(
    source: Source, clock: ManualClock
) -> None:
    issued, other = issue_api_key(), issue_api_key()
    source.add(issued)
    source.api_keys[issued.id] = replace(source.api_keys[issued.id], sha256=other.sha256)
    assert await RecentApiKeys(source, clock).find(issued.text) is None


async def test_a_revocation_elsewhere_takes_effect_within_five_seconds(
    source: Source, clock: ManualClock
) -> None:
    issued = issue_api_key()
    source.add(issued)
    recent = RecentApiKeys(source, clock)
    assert await recent.is_valid(issued.id, issued.sha256)
    source.api_keys[issued.id] = replace(source.api_keys[issued.id], revoked_at=clock.now())
    clock.advance(KEPT_S)
    assert KEPT_S <= 5
    assert not await recent.is_valid(issued.id, issued.sha256)


async def test_a_new_api_key_is_known_within_a_moment(source: Source, clock: ManualClock) -> None:
    recent = RecentApiKeys(source, clock)
    issued = issue_api_key()
    assert await recent.find(issued.text) is None
    source.add(issued)
    clock.advance(0.3)
    assert await recent.find(issued.text) is not None


async def test_without_the_database_a_known_api_key_is_valid_for_a_while(
    source: Source, clock: ManualClock
) -> None:
    issued = issue_api_key()
    source.add(issued)
    recent = RecentApiKeys(source, clock)
    await recent.find(issued.text)
    source.is_away = True
    clock.advance(STALE_S - 0.1)
    assert await recent.find(issued.text) is not None
    clock.advance(0.2)
    with pytest.raises(TransientError):
        await recent.find(issued.text)
    source.is_away = False
    clock.advance(0.3)
    assert await recent.find(issued.text) is not None


async def test_the_last_use_is_written_once_a_minute(source: Source, clock: ManualClock) -> None:
    issued = issue_api_key()
    source.add(issued)
    recent = RecentApiKeys(source, clock)
    written = 0
    for _ in range(100):
        await recent.find(issued.text)
        written += len(recent.take_used())
        clock.advance(1)
    assert written == 1 + 100 // int(USED_S)


async def test_the_old_secret_of_a_rotated_api_key_opens_until_its_overlap_ends(
    source: Source, clock: ManualClock
) -> None:
    issued = issue_api_key()
    fresh = issue_api_key(issued.id)
    source.add(issued)
    source.api_keys[issued.id] = replace(
        source.api_keys[issued.id],
        sha256=fresh.sha256,
        old_sha256=issued.sha256,
        old_until=clock.now() + timedelta(seconds=60),
    )
    recent = RecentApiKeys(source, clock)
    assert await recent.is_valid(issued.id, issued.sha256)
    clock.advance(61)
    assert not await recent.is_valid(issued.id, issued.sha256)
    assert await recent.is_valid(issued.id, fresh.sha256)
    old = await recent.find(issued.text)
    assert old is not None
    assert old.has_old_secret
