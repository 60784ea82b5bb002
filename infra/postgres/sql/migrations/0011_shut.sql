-- What waits for a run that rests costs the claims of others nothing.

-- Whether the effect's run is paused or held: what its gate says, kept with the effect so that the index
-- of what can be claimed leaves it out. It only ever saves work: a claim looks at the gate as well.
alter table effects add column shut boolean not null default false;
update effects e set shut = true from run_gates g
where g.run_id = e.run_id and (g.state = 'paused' or g.holds > 0);

drop index effects_ready;
create index effects_ready on effects (lane, consumer, due_at, created)
where worker is null and not shut;

-- A gate that moves takes the effects of its run along. When it shuts, what is in other hands at this
-- moment is passed over. When it opens, each is waited for: shut, nobody would ever look at it again.
create function shut_effects() returns trigger language plpgsql as $$
begin
    if new.state = 'paused' or new.holds > 0 then
        update effects e set shut = true
        where e.id in (select c.id from effects c where c.run_id = new.run_id and not c.shut
                       for update skip locked);
    else
        update effects e set shut = false where e.run_id = new.run_id and e.shut;
    end if;
    return null;
end $$;
create trigger gates_set after insert on run_gates for each row
when (new.state = 'paused' or new.holds > 0)
execute function shut_effects();
create trigger gates_moved after update on run_gates for each row
when ((old.state = 'paused' or old.holds > 0) <> (new.state = 'paused' or new.holds > 0))
execute function shut_effects();

-- As before, and what is asked for in the name of a run that rests is shut from the beginning.
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
    resting text[];
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
        -- Locked, so that whoever opens such a gate waits for what is written here under it.
        select array_agg(g.run_id) into resting from (
            select r.run_id from run_gates r
            where r.run_id = any (f_run) and (r.state = 'paused' or r.holds > 0)
            order by r.run_id for share
        ) g;
        insert into effects (id, consumer, stream, lane, run_id, type, data, correlation,
                             traceparent, worker, epoch, shut)
        select f.id, f.consumer, f.stream, f.lane, f.run, f.type, f.data::json, f.correlation,
               f.trace, case when f.claimed then p_worker end, case when f.claimed then 1 else 0 end,
               coalesce(f.run = any (resting), false)
        from unnest(f_id, f_consumer, f_stream, f_lane, f_run, f_type, f_data, f_correlation,
                    f_trace, f_claimed)
             as f (id, consumer, stream, lane, run, type, data, correlation, trace, claimed)
        where not exists (select from run_gates g where g.run_id = f.run and g.state = 'closed')
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

-- As before, without what is shut; and what a dead worker held of runs that rest is given back.
create or replace function claim_effects(p_worker text, p_lanes text[], p_consumers text[], p_limit integer)
returns setof effects language plpgsql
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    dead text;
    queue record;
    taken integer;
    room integer := p_limit;
begin
    if not exists (select from workers w where w.id = p_worker and w.expires_at > clock_timestamp()) then
        return;
    end if;
    for dead in
        with recursive holders (name) as (
            (select e.worker from effects e where e.worker is not null order by e.worker limit 1)
            union all
            select (select e.worker from effects e where e.worker > h.name order by e.worker limit 1)
            from holders h where h.name is not null
        )
        select h.name from holders h
        where h.name <> p_worker
          and not exists (select from workers w
                          where w.id = h.name and w.expires_at > clock_timestamp())
    loop
        exit when room = 0;
        -- Once: then they lie with what waits for their runs, and the next claim does not meet them.
        update effects e set worker = null, crashes = e.crashes + 1
        where e.id in (select c.id from effects c where c.worker = dead and c.shut
                       for update skip locked);
        return query
            with picked as materialized (
                select c.id from effects c
                where c.worker = dead and not c.shut
                  and c.lane = any (p_lanes) and c.consumer = any (p_consumers)
                  and c.due_at <= (select clock_timestamp())
                  and coalesce((select g.state = 'open' and g.holds = 0
                                from run_gates g where g.run_id = c.run_id), true)
                order by c.due_at, c.created
                limit room
                for update skip locked
            )
            update effects e
            set worker = p_worker, epoch = e.epoch + 1, crashes = e.crashes + 1
            from picked p where e.id = p.id
            returning e.*;
        get diagnostics taken = row_count;
        room := room - taken;
    end loop;
    for queue in
        select q.lane, q.consumer
        from (select l.lane, n.consumer
              from unnest(p_lanes) as l (lane) cross join unnest(p_consumers) as n (consumer)) q
        cross join lateral (
            select e.due_at, e.created from effects e
            where e.worker is null and not e.shut and e.lane = q.lane and e.consumer = q.consumer
              and e.due_at <= (select clock_timestamp())
            order by e.due_at, e.created limit 1
        ) head
        order by head.due_at, head.created
    loop
        exit when room = 0;
        return query
            with picked as materialized (
                select c.id from effects c
                where c.worker is null and not c.shut and c.lane = queue.lane and c.consumer = queue.consumer
                  and c.due_at <= (select clock_timestamp())
                  and coalesce((select g.state = 'open' and g.holds = 0
                                from run_gates g where g.run_id = c.run_id), true)
                order by c.due_at, c.created
                limit room
                for update skip locked
            )
            update effects e
            set worker = p_worker, epoch = e.epoch + 1
            from picked p where e.id = p.id
            returning e.*;
        get diagnostics taken = row_count;
        room := room - taken;
    end loop;
end $$;
