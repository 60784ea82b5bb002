-- The state of a run at an event of its log: what `infra/readmodel/moments.py` asks.
-- How this file is read: `infra/postgres/queries.py`.

-- Of each type in these streams, how many events there were up to a cursor, and the newest one.

-- name: newest_of_types
select stream, type, max(version) as version, count(*) as count
from events where stream = any ($1) and (xid, position) <= ($2::text::xid8, $3)
group by stream, type

-- name: event_before
select xid::text::bigint as xid, position from events
where run_id = $1 and (xid, position) < ($2::text::xid8, $3)
order by xid desc, position desc limit 1

-- name: event_at
select stream, version from events
where run_id = $1 and (xid, position) = ($2::text::xid8, $3)
