"""Repairs the transaction ids of a dump that was restored into another cluster.

The log is read in order of (xid, position). In a new cluster transaction ids start small again, so new
events would be ordered below the restored ones and below every cursor, and no reader would see them. So
`migrate` compares the cluster's identifier with the one that it recorded last. If they differ, it makes
these changes:

- The xids of all recorded events become 0, which is below every future xid. Positions keep the order:
  within a stream, and from cause to effect, it is the order of the appends.
- Each cursor (the watermarks, and that of the relay) is put before the first event that it had not
  passed. In the old order it may have passed events after that one. Inbox rows are written for those, so
  that no event is consumed twice.
- Claims and leases are dropped without counting a crash, because their workers belong to the old
cluster.
- The role of processes is created again, because a dump holds no roles.
"""

import logging
from typing import Any

logger = logging.getLogger(__name__)

CURSORS = """
select c.table_name from information_schema.columns c
join information_schema.columns p using (table_schema, table_name)
where c.table_schema = current_schema() and c.column_name = 'xid' and c.udt_name = 'xid8'
  and p.column_name = 'position' and c.table_name <> 'events'
"""
"""Tables whose rows are positions in the log."""

FOREIGN = """
select exists (
    select from (select xid from events order by xid desc, position desc limit 1) as last
    where last.xid >= pg_snapshot_xmax(pg_current_snapshot())
)
"""
"""Whether the log holds a transaction that this cluster has not begun."""

PASSED_BEHIND = """
insert into inbox (consumer, event_id)
select w.consumer, e.id from watermarks w join events e
    on (e.xid, e.position) <= (w.xid, w.position)
where w.consumer <> 'project' and e.position > (select min(f.position) from events f
                    where (f.xid, f.position) > (w.xid, w.position))
on conflict do nothing
"""

TRANSLATE = """
update {table} t set xid = '0', position = coalesce(
    (select min(e.position) - 1 from events e where (e.xid, e.position) > (t.xid, t.position)),
    (select max(e.position) from events e), 0)
"""

FORGET_XIDS = (
    "alter table events disable trigger events_are_facts",
    "update events set xid = '0'",
    "alter table events enable trigger events_are_facts",
    "update inbox set xid = '0'",
    "update log_lines set xid = 0",
    "update skipped_events set xid = 0",
    "update effects set worker = null where worker is not null",
    "delete from workers",
    "delete from worker_doors",
    "delete from chat_grants",
    "delete from serving_doors",
    "delete from serving_grants",
    "delete from browser_sessions",
    "delete from sign_in_codes",
    "select grant_processes()",
)


async def repair_if_moved(connection: Any) -> bool:
    """Repair the database if it is in another cluster than before. Returns whether it was repaired. Call
    it in a transaction, as the owner, at the newest schema."""
    here = await connection.fetchval("select system_identifier from pg_control_system()")
    known = await connection.fetchval("select system_identifier from cluster")
    moved = known not in (None, here) or await connection.fetchval(FOREIGN)
    if moved:
        await repair(connection)
        logger.warning("the database came from cluster %s to %s: cursors repaired", known, here)
    if known != here:
        await connection.execute(
            "insert into cluster (system_identifier) values ($1) on conflict (alone) do update"
            " set system_identifier = excluded.system_identifier, since = clock_timestamp()",
            here,
        )
    return bool(moved)


async def repair(connection: Any) -> None:
    """Set the transaction ids of everything that is recorded to 0, so that it lies before all future
    events."""
    await connection.execute(PASSED_BEHIND)
    for row in await connection.fetch(CURSORS):
        await connection.execute(TRANSLATE.format(table=row["table_name"]))
    for statement in FORGET_XIDS:
        await connection.execute(statement)
