"""Groups that are read page by page, as datasets of recorded samples are made."""

from datetime import UTC, datetime

import pytest

from infra.readmodel.runs import Runs
from infra.spine.postgres.pool import Database
from schemas.ids import REFUTED

pytestmark = pytest.mark.postgres

INSERT = """insert into graded_groups
  (owner, purpose, step, slot, replacement, dataset_row, num_samples, artifact, grades, at)
select 'r', 'train', 1, slot, number, 0, 1, '', '', $3
from unnest($1::int[], $2::int[]) as g (slot, number)"""


async def test_groups_with_refuted_samples_are_left_out(database: Database) -> None:
    """Slot 0 was replaced by another row, and slot 1 was generated again twice."""
    made = [(0, 0), (0, 1), (1, 0), (1, REFUTED), (1, 2 * REFUTED), (2, 0)]
    slots, numbers = zip(*made, strict=True)
    at = datetime(2026, 1, 1, tzinfo=UTC)
    await database.durable.execute(INSERT, list(slots), list(numbers), at)
    found = await Runs(database).groups_after("r", "train", (0, 9, 9), last_step=5, limit=99)
    places = [(group.slot, group.replacement) for group in found]
    assert places == [(0, 0), (0, 1), (1, 2 * REFUTED), (2, 0)]
