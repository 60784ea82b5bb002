-- The state of a run at an event of its log: what `infra/readmodel/state_at_event.py` asks.
-- How this file is read: `infra/spine/postgres/queries.py`.

-- Of each of the types $4 the newest event up to a cursor, and of the types $5 all of them. An index holds these
-- types of events only.

-- name: milestones
select stream, array_agg(version) filter (where type = any ($5)) as every, max(version) as version
from events where run_id = $1 and (xid, position) <= ($2::text::xid8, $3)
and (type like 'rl.run.%' or type like 'rl.evaluation.%') and type = any ($4)
group by stream, type

-- The newest event of each of these types up to a cursor. Each step has one, so that it is found near the end.

-- name: newest_of_steps
select n.stream, n.version from unnest($4::text[]) as t (type)
cross join lateral (
  select e.stream, e.version from events e
  where e.run_id = $1 and e.type = t.type and (e.xid, e.position) <= ($2::text::xid8, $3)
  order by e.xid desc, e.position desc limit 1) n

-- The newest event of a stream up to a cursor.

-- name: newest_of_stream
select stream, version from events e
where e.stream = $1 and (e.xid, e.position) <= ($2::text::xid8, $3) order by e.version desc limit 1

-- name: event_at
select stream, version from events
where run_id = $1 and (xid, position) = ($2::text::xid8, $3) and type = any ($4)

-- Where a page of events begins that ends before a cursor: the event before its first one, if there is one.

-- name: before_page
select e.xid::text::bigint as xid, e.position from events e
where e.run_id = $1 and (e.xid, e.position) < ($2::text::xid8, $3) and {kind: of_types | of_milestones}
order by e.xid desc, e.position desc offset $5 limit 1

-- part: of_types
e.type = any ($4)

-- part: of_milestones
(e.type like 'rl.run.%' or e.type like 'rl.evaluation.%') and e.type = any ($4)

-- Where a step was settled. Its policy was made by the step that its state names, which is an earlier one if the step
-- was skipped, or is the first event of the policy. An index holds these events by their steps.

-- name: settled_step
select $3::integer as step, s.version as position, coalesce((
  select p.version from events p
  where p.stream = $2 and (p.data ->> 'step')::integer = (s.data -> 'state' ->> 'step')::integer
  and p.type in ('rl.step.settled', 'rl.policy.updated') order by p.version limit 1), 1) as policy_position
from events s
where s.stream = $1 and (s.data ->> 'step')::integer = $3
and s.type in ('rl.step.settled', 'rl.policy.updated') order by s.version limit 1

-- name: newest_settled
select (s.data ->> 'step')::integer as step from events s
where s.stream = $1 and s.type in ('rl.step.settled', 'rl.policy.updated')
and (s.xid, s.position) <= ($2::text::xid8, $3) order by (s.data ->> 'step')::integer desc limit 1

-- name: cursor_of
select e.xid::text::bigint as xid, e.position from events e where e.run_id = $1 and e.id = $2 limit 1
