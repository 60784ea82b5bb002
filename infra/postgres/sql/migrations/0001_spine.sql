-- The spine: events and their streams, the inbox, effects and the leases of who performs them.

create table streams (
    stream  text primary key,
    version integer not null
) with (fillfactor = 50);

-- Arbitration is on streams, never on a unique index over all events, so that this table can be
-- partitioned by position later. Readers order by (xid, position) and stop below the horizon.
create table events (
    position       bigint generated always as identity,
    xid            xid8 not null default pg_current_xact_id(),
    id             uuid not null,
    stream         text not null,
    version        integer not null,
    type           text not null,
    schema_version integer not null,
    data           json not null,
    run_id         text not null,
    causation      uuid,
    correlation    uuid not null,
    traceparent    text,
    time           timestamptz not null default clock_timestamp()
);
create index events_tail on events (xid, position);
create index events_stream on events (stream, version);
create index events_run on events (run_id, xid, position);

-- One row per consumed event above the consumer's watermark. xid is the consuming transaction's, so
-- it is never below the event's own: rows below the watermark's xid can go.
create table inbox (
    consumer text not null,
    event_id uuid not null,
    xid      xid8 not null default pg_current_xact_id(),
    primary key (consumer, event_id)
);

create table watermarks (
    consumer text primary key,
    xid      xid8 not null,
    position bigint not null
);

create table workers (
    id         text primary key,
    host       text not null,
    pid        integer not null,
    lanes      text[] not null default '{}',
    started_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null
);

create table run_gates (
    run_id text primary key,
    state  text not null check (state in ('open', 'paused', 'closed'))
);

-- Work that was asked for and is not finished. A claim is (worker, epoch); it is live while its
-- worker's lease is. An outcome is accepted only under the claim's epoch.
create table effects (
    id          uuid primary key,
    consumer    text not null,
    stream      text not null,
    lane        text not null,
    run_id      text not null,
    type        text not null,
    data        json not null,
    correlation uuid not null,
    traceparent text,
    created     bigint generated always as identity,
    due_at      timestamptz not null default clock_timestamp(),
    worker      text,
    epoch       integer not null default 0,
    attempts    integer not null default 0,
    crashes     integer not null default 0,
    memo        text,
    error       text
) with (fillfactor = 50);
create index effects_claimable on effects (lane, created);
create index effects_run on effects (run_id);

create table artifacts (
    sha256 text primary key,
    data   bytea not null
);

create table snapshots (
    stream       text not null,
    fold_version integer not null,
    version      integer not null,
    state        text not null,
    primary key (stream, fold_version)
);

alter table inbox set (autovacuum_vacuum_scale_factor = 0.02);
alter table effects set (autovacuum_vacuum_scale_factor = 0.02);

-- One decision, whole or not at all. Raises HR001 stale (a stream moved), HR002 fenced (a claim was
-- lost), or a unique violation on the inbox (consumed already).
create function commit_decision(
    p_worker text,
    p_consumers text[], p_consumed uuid[],
    p_finished uuid[], p_epochs integer[],
    p_streams text[], p_expected integer[], p_versions integer[],
    e_id uuid[], e_stream text[], e_version integer[], e_type text[], e_schema integer[],
    e_data text[], e_run text[], e_causation uuid[], e_correlation uuid[], e_trace text[],
    f_id uuid[], f_consumer text[], f_stream text[], f_lane text[], f_run text[], f_type text[],
    f_data text[], f_correlation uuid[], f_trace text[], f_claimed boolean[],
    a_sha text[], a_data bytea[],
    g_run text[], g_state text[]
) returns table (r_position bigint, r_xid xid8, r_time timestamptz)
language plpgsql as $$
declare
    lost uuid;
begin
    if cardinality(p_consumed) > 0 then
        insert into inbox (consumer, event_id) select * from unnest(p_consumers, p_consumed);
    end if;
    if cardinality(p_finished) > 0 then
        with gone as (
            delete from effects e using unnest(p_finished, p_epochs) as f (id, epoch)
            where e.id = f.id and e.epoch = f.epoch and e.worker = p_worker
            returning e.id
        )
        select f.id into lost from unnest(p_finished) as f (id)
        where f.id not in (select gone.id from gone) limit 1;
        if lost is not null then
            raise exception '%', lost using errcode = 'HR002';
        end if;
    end if;
    for i in 1 .. cardinality(p_streams) loop
        if p_expected[i] = 0 then
            insert into streams (stream, version) values (p_streams[i], p_versions[i])
            on conflict do nothing;
        else
            update streams set version = p_versions[i]
            where stream = p_streams[i] and version = p_expected[i];
        end if;
        if not found then
            raise exception '%', p_streams[i] using errcode = 'HR001';
        end if;
    end loop;
    if cardinality(f_id) > 0 then
        insert into effects (id, consumer, stream, lane, run_id, type, data, correlation,
                             traceparent, worker, epoch)
        select f.id, f.consumer, f.stream, f.lane, f.run, f.type, f.data::json, f.correlation,
               f.trace, case when f.claimed then p_worker end, case when f.claimed then 1 else 0 end
        from unnest(f_id, f_consumer, f_stream, f_lane, f_run, f_type, f_data, f_correlation,
                    f_trace, f_claimed)
             as f (id, consumer, stream, lane, run, type, data, correlation, trace, claimed)
        on conflict (id) do nothing;
    end if;
    if cardinality(a_sha) > 0 then
        insert into artifacts (sha256, data) select * from unnest(a_sha, a_data)
        on conflict do nothing;
    end if;
    for i in 1 .. cardinality(g_run) loop
        insert into run_gates as g (run_id, state) values (g_run[i], g_state[i])
        on conflict (run_id) do update set state = excluded.state where g.state <> 'closed';
        if g_state[i] = 'closed' then
            delete from effects where run_id = g_run[i];
        end if;
    end loop;
    return query
        insert into events (id, stream, version, type, schema_version, data, run_id, causation,
                            correlation, traceparent)
        select e.id, e.stream, e.version, e.type, e.schema, e.data::json, e.run, e.causation,
               e.correlation, e.trace
        from unnest(e_id, e_stream, e_version, e_type, e_schema, e_data, e_run, e_causation,
                    e_correlation, e_trace)
             with ordinality
             as e (id, stream, version, type, schema, data, run, causation, correlation, trace, n)
        order by e.n
        returning events.position, events.xid, events.time;
end $$;

-- Claim due effects: gate open, nobody with a live lease holds them. Taking over from a dead worker
-- counts a crash.
create function claim_effects(p_worker text, p_lanes text[], p_consumers text[], p_limit integer)
returns setof effects language sql as $$
    update effects e
    set worker = p_worker, epoch = e.epoch + 1,
        crashes = e.crashes + case when e.worker is null then 0 else 1 end
    where e.id in (
        select c.id from effects c
        where c.lane = any (p_lanes) and c.consumer = any (p_consumers)
          and c.due_at <= clock_timestamp()
          and not exists (select from workers w
                          where w.id = c.worker and w.expires_at > clock_timestamp())
          and not exists (select from run_gates g
                          where g.run_id = c.run_id and g.state <> 'open')
        order by c.created
        limit p_limit
        for update skip locked
    )
    returning e.*
$$;
