-- Which blobs belong to this database: one row, written by the first process that worked on it.
create table installation (
    alone boolean primary key default true check (alone),
    id    text not null,
    blobs text not null,
    place text not null,
    since timestamptz not null default clock_timestamp()
);

-- Which cluster the transaction ids in this database are of. In another one (a dump was restored) they
-- mean nothing, and would hide what is appended next: infra/repair.py puts that right.
create table cluster (
    alone             boolean primary key default true check (alone),
    system_identifier bigint not null,
    since             timestamptz not null default clock_timestamp()
);

-- A run is held while it has dead letters that pause it; whether its own events keep it open, paused or
-- closed is another matter.
alter table run_gates add column holds integer not null default 0;

-- Read model: dead letters, as the log tells of them.
create table dead_letters (
    letter       text primary key,
    version      integer not null,
    consumer     text not null,
    message_type text not null,
    about        text not null,
    cause        text not null,
    pauses       boolean not null,
    created_at   timestamptz not null,
    redriven_at  timestamptz
);
create index dead_letters_recent on dead_letters (created_at desc, letter);
create index dead_letters_waiting on dead_letters (about) where pauses and redriven_at is null;
select grant_processes();

-- As before, and a gate may be given as 'hold' or 'release'.
create or replace function commit_decision(
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
    held integer;
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
        if g_state[i] in ('hold', 'release') then
            held := case g_state[i] when 'hold' then 1 else -1 end;
            insert into run_gates as g (run_id, state, holds)
            values (g_run[i], 'open', greatest(held, 0))
            on conflict (run_id) do update set holds = greatest(g.holds + held, 0);
            continue;
        end if;
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

-- Claim due effects: the worker's lease is live, the gate open and the run not held, and nobody else with
-- a live lease holds them. Taking over from a dead worker counts a crash; what this worker holds already
-- is not claimed again, even if its lease ran out meanwhile.
create or replace function claim_effects(
    p_worker text, p_lanes text[], p_consumers text[], p_limit integer
) returns setof effects language sql as $$
    update effects e
    set worker = p_worker, epoch = e.epoch + 1,
        crashes = e.crashes + case when e.worker is null then 0 else 1 end
    where e.id in (
        select c.id from effects c
        where c.lane = any (p_lanes) and c.consumer = any (p_consumers)
          and c.due_at <= clock_timestamp()
          and c.worker is distinct from p_worker
          and exists (select from workers w
                      where w.id = p_worker and w.expires_at > clock_timestamp())
          and not exists (select from workers w
                          where w.id = c.worker and w.expires_at > clock_timestamp())
          and not exists (select from run_gates g
                          where g.run_id = c.run_id
                            and (g.state <> 'open' or g.holds > 0))
        order by c.created
        limit p_limit
        for update skip locked
    )
    returning e.*
$$;
