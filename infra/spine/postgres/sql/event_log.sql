-- The event log: what `infra/spine/postgres/event_log.py` and `infra/operations/maintenance/archive.py` ask.
-- How this file is read: `infra/spine/postgres/queries.py`.

-- part: event_columns
position, xid, id, stream, version, type, schema_version, data, run_id, causation,
correlation, traceparent, time, actor

-- The two horizons, and the bound of a reader that goes on where another one stopped. What was below a
-- horizon once is complete for good; another horizon, as of now, could be below that bound and hide events
-- that the reader would then skip.

-- part: below_horizon
xid < pg_snapshot_xmin(pg_current_snapshot())

-- part: below_own_horizon
xid < (select own_horizon(pg_current_snapshot()))

-- part: upto_cursor
(xid, position) <= ($4, $5)

-- Whether the consumer `consumer_name` has not consumed event `e`. One statement and so one snapshot: a
-- reader that no longer sees a purged inbox row sees the watermark instead.

-- part: not_consumed
not exists (select from inbox i where i.consumer = consumer_name and i.event_id = e.id)
and not exists (select from watermarks m where m.consumer = consumer_name
                and (m.xid, m.position) >= (e.xid, e.position))

-- Events of some types. An index holds the milestones of runs only (`MILESTONES` in the module).

-- part: of_types
type = any ($5)

-- part: of_milestones
(type like 'rl.run.%' or type like 'rl.evaluation.%') and type = any ($5)

-- Events that edges appended: each begins a correlation of its own. An index holds only these, so that the
-- log itself remembers what was appended, permanently and without a copy.

-- part: appended_by_edges
id = any ($1) and causation = correlation


-- == Reading ==============================================================================================

-- name: load
select {event_columns} from unnest($1::text[], $2::integer[]) as w (name, above)
join events on stream = w.name and version > w.above order by stream, version limit $3

-- name: versions
select stream, version from streams where stream = any ($1)

-- name: tail
select {event_columns} from events where (xid, position) > ($1, $2)
and {end: below_horizon | below_own_horizon | upto_cursor} order by xid, position limit $3

-- The order matters: without it the planner walks through the whole log when nothing lies ahead.

-- name: position_after
select position from events where (xid, position) > ($1, $2)
order by xid, position limit 1

-- name: position_from
select position from events where (xid, position) >= ($1, $2)
order by xid, position limit 1

-- name: visible_head
select xid, position from events where {below_own_horizon}
order by xid desc, position desc limit 1

-- name: clock_time
select clock_timestamp()

-- name: events_at
select {event_columns} from unnest($1::text[], $2::integer[]) as w (name, at)
join events on stream = w.name and version = w.at

-- name: read_run
select {event_columns} from events where run_id = $1 and (xid, position) > ($2, $3)
and {end: below_horizon | below_own_horizon} and {kind: of_types | of_milestones}
order by xid, position limit $4

-- name: artifact
select data from artifacts where sha256 = $1

-- The newest snapshot, or the newest up to a version.

-- name: snapshot
select version, state from (
    select version, state from snapshots where stream = $1 and fold_version = $2
    union all
    select version, state from kept_snapshots where stream = $1 and fold_version = $2 and $3::integer is not null
) s where $3::integer is null or version <= $3 order by version desc limit 1

-- Of each $5 versions one snapshot is kept: the first that was saved.

-- name: save_snapshot
with kept as (
    insert into kept_snapshots (stream, fold_version, version, state)
    select $1, $2, $3::integer, $4 where $5::integer is not null and not exists (
        select from kept_snapshots k where k.stream = $1 and k.fold_version = $2
        and k.version between $3::integer / $5 * $5 and $3::integer / $5 * $5 + $5 - 1)
    on conflict do nothing
)
insert into snapshots as s (stream, fold_version, version, state)
values ($1, $2, $3, $4) on conflict (stream, fold_version) do update
set version = excluded.version, state = excluded.state
where excluded.version > s.version


-- == Consuming ============================================================================================

-- name: unconsumed_at
select {event_columns}, array(select consumer_name
                              from unnest(string_to_array(w.names, ' ')) as n (consumer_name)
                              where {not_consumed}) as awaiting
from unnest($1::text[], $2::integer[], $3::text[]) as w (held, at, names)
join events e on e.stream = w.held and e.version = w.at

-- name: consumed
select consumer, event_id from inbox
join unnest($1::text[], $2::uuid[]) as w (name, id) on consumer = name and event_id = id

-- name: unconsumed
select n from unnest($1::text[], $2::uuid[], $3::xid8[], $4::bigint[])
with ordinality as e (consumer_name, id, xid, position, n)
where {not_consumed} order by n

-- name: watermark
select xid, position from watermarks where consumer = $1

-- In one statement, so that whoever sees the watermark there sees no row below it. A row that another
-- process deletes at this moment counts as deleted.

-- name: advance
with moved as (
    insert into watermarks as w (consumer, xid, position) select n, $2, $3
    from unnest($1::text[]) n
    on conflict (consumer) do update set xid = excluded.xid, position = excluded.position
    where (excluded.xid, excluded.position) > (w.xid, w.position))
delete from inbox where ctid = any (array(select ctid from inbox
where consumer = any ($1) and xid < $2 for update skip locked))


-- == Writing ==============================================================================================

-- The arguments are in the order of `arguments_of` in `infra/spine/postgres/codec.py`; what each is, says the
-- function in `schema.sql`.

-- name: commit
select * from commit_decision(
    $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17,
    $18, $19, $20, $21, $22, $23, $24, $25, $26, $27, $28, $29, $30, $31, $32, $33, $34, $35, $36, $37, $38)

-- The versions of streams, and whether these events were appended already. One snapshot: a commit that finds
-- the streams unmoved has seen everything that was appended to them.

-- name: before_append
select w.stream, coalesce(s.version, 0) as version,
    exists (select from events where {appended_by_edges}) as appended
from unnest($2::text[]) as w (stream) left join streams s using (stream)

-- name: appended
select {event_columns} from events where {appended_by_edges} order by position


-- == Archives =============================================================================================

-- What events of a run's history may be about: the run, and the validations that it requested.

-- name: owners
select $1 union select data ->> 'evaluation' from events
where stream = $2 and type = 'rl.evaluation.requested'

-- What an archive holds: everything but the request, which is the first event of the run's stream, and the
-- checkpoints. Dead letters belong to their consumers.

-- name: history
select {event_columns} from events
where run_id = any ($1) and stream not like 'dead-letter-%' and stream <> $2
  and not (stream = $3 and version = 1)
order by xid, position

-- name: kept_events
select {event_columns} from events where stream = $1 or stream = $2 and version = 1

-- name: insert_events
insert into events (position, xid, id, stream, version, type, schema_version, data, run_id, causation,
                    correlation, traceparent, time, actor) overriding system value
select position, xid::xid8, id, stream, version, type, schema_version, data::json, run_id, causation,
       correlation, traceparent, time, actor
from unnest($1::bigint[], $2::text[], $3::uuid[], $4::text[], $5::integer[], $6::text[], $7::integer[],
            $8::text[], $9::text[], $10::uuid[], $11::uuid[], $12::text[], $13::timestamptz[],
            $14::text[])
     as e (position, xid, id, stream, version, type, schema_version, data, run_id, causation,
           correlation, traceparent, time, actor)

-- name: consumer_behind
select w.consumer from watermarks w, (
    select xid, position from events where run_id = $1 order by xid desc, position desc limit 1) last
where (w.xid, w.position) < (last.xid, last.position) order by w.consumer limit 1

-- name: notice
select xid::text from events where stream = $1 and version = 2 and type = $2

-- name: small_artifacts
select sha256, data from artifacts where sha256 = any ($1)

-- name: insert_artifact
insert into artifacts (sha256, data) values ($1, $2) on conflict do nothing

-- The actor of the notice that the functions below leave (`leave_notice` in `schema.sql`).

-- name: set_actor
select set_config('headrace.actor', $1, false)

-- name: remove_run
select * from remove_run($1, $2, $3, $4, $5, $6, $7, $8)

-- name: count_records
select r_kind, r_count from count_records($1, $2)

-- name: record_types
select unnest(record_types($1)) as type

-- name: remove_page
select r_removed, r_time, r_position from remove_page($1, $2, $3, $4, $5, $6)

-- name: remove_evaluation
select remove_evaluation($1) as removed

-- name: remove_old_rows
select remove_old_rows($1, $2, $3) as removed

-- name: remove_artifact
select * from remove_artifact($1, $2, $3, $4, $5, $6, $7)

-- name: remove_dataset_version
select * from remove_dataset_version($1, $2, $3, $4, $5, $6, $7, $8, $9)

-- name: restore_run
select * from restore_run($1, $2, $3, $4, $5, $6, $7)
