-- When the phases of steps began and ended: what `infra/readmodel/timeline.py` asks.
-- How this file is read: `infra/spine/postgres/queries.py`.

-- The first settled step of a run at or above a version of its stream. Steps are settled in their order, so
-- a search by halves finds a step.

-- name: settled_from
select version, xid::text::bigint as xid, position, (data->>'step')::int as step
from events where stream = $1 and version >= $2 and type = 'rl.step.settled'
order by version limit 1

-- name: run_version
select version from streams where stream = $1

-- The events of a run between two cursors. The streams of groups name their step; of the others it is read.

-- name: step_events
select stream, type, time,
  case when type = any ($7) then null else coalesce(data->>'step', data->'spec'->>'step')::int end as step
from events where run_id = $1 and (xid, position) > ($2::text::xid8, $3)
and (xid, position) <= ($4::text::xid8, $5) and type = any ($6)
order by xid, position limit $8
