"""A server shows by its paths which generation of the protocol it speaks."""

from typing import Any

import pytest

from headrace.servers.dialects import UnknownDialect, capacity_of, dialect_of, find_dialect
from tests.unit.headrace.servers.scripted import Answer, scripted


@pytest.mark.parametrize(
    ("paths", "dialect"),
    [
        (["/health", "/rollout", "/rollout/cancel", "/rollout/{rollout_id}/result"], "leases"),
        (["/rollout", "/rollout/cancel", "/rollout/{id}/status"], "single reports"),
        (["/health", "/rollout"], "reports"),
    ],
)
def test_the_paths_show_the_generation(paths: list[str], dialect: str) -> None:
    assert dialect_of(paths) == dialect


@pytest.mark.parametrize(
    ("paths", "why"), [(["/v1/rollout/init"], "generation 0"), (["/x"], "only /x"), ([], "none")]
)
def test_other_servers_are_refused_by_name(paths: list[str], why: str) -> None:
    with pytest.raises(UnknownDialect, match=why):
        dialect_of(paths)


@pytest.mark.parametrize("answer", [(404, {}), (200, []), (200, {"paths": 3}), (200, "x")])
async def test_a_server_without_a_schema_speaks_the_current_generation(answer: Answer) -> None:
    async def script(asked: str, body: Any) -> Answer:
        return answer

    async with scripted(script) as server:
        assert await find_dialect(server) == "leases"


@pytest.mark.parametrize(
    ("health", "capacity"),
    [
        ({"concurrency": {"max_concurrent": 4}}, 4),
        ({"concurrency": {"max_concurrent": None}}, None),
        ({"concurrency": {"max_concurrent": -1}}, None),
        ({"status": "ok"}, None),
        ([], None),
    ],
)
async def test_a_server_says_how_much_it_works_on(health: object, capacity: int | None) -> None:
    async def script(asked: str, body: Any) -> Answer:
        return 200, health

    async with scripted(script) as server:
        assert await capacity_of(server) == capacity
