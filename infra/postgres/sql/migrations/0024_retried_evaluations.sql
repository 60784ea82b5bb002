-- An evaluation that ended can be retried, so its gate opens again.

create or replace function commit_decision(
    p_worker text,
    p_consumers text[], p_consumed uuid[], p_xids xid8[], p_positions bigint[],
    p_finished uuid[], p_epochs integer[],
    p_streams text[], p_expected integer[], p_versions integer[],
    e_id uuid[], e_stream text[], e_version integer[], e_type text[], e_schema integer[],
    e_data text[], e_run text[], e_causation uuid[], e_correlation uuid[], e_trace text[],
    f_id uuid[], f_consumer text[], f_stream text[], f_lane text[], f_run text[], f_type text[],
    f_data text[], f_correlation uuid[], f_trace text[], f_claimed boolean[],
    a_sha text[], a_data bytea[],
    g_run text[], g_state text[],
    e_actor text[]
) returns table (r_position bigint, r_xid xid8, r_time timestamptz)
language plpgsql as $$
declare
    lost uuid;
    held integer;
    resting text[];
begin
    -- Gates first. Setting a gate locks it, and the gates of runs whose effects are requested or finished.
    -- Otherwise only the gates of runs that rest are locked, shared, so that their effects are born shut.
    if cardinality(g_run) > 0 then
        select array_agg(g.run_id) filter (where g.rests) into resting from (
            select r.run_id, r.state = 'paused' or r.holds > 0 as rests from run_gates r
            where r.run_id = any (g_run || f_run || array(
                select e.run_id from effects e where e.id = any (p_finished)))
            order by r.run_id for no key update
        ) g;
    elsif (cardinality(f_run) > 0 or cardinality(p_finished) > 0)
          and exists (select from run_gates r where r.state = 'paused' or r.holds > 0) then
        select array_agg(g.run_id) into resting from (
            select r.run_id from run_gates r
            where r.run_id = any (f_run || array(
                      select e.run_id from effects e where e.id = any (p_finished)))
              and (r.state = 'paused' or r.holds > 0)
            order by r.run_id for share
        ) g;
    end if;
    -- Consumed, once: the primary key refuses a second time, and the watermark one that was purged.
    if cardinality(p_consumed) > 0 then
        insert into inbox (consumer, event_id) select * from unnest(p_consumers, p_consumed);
        -- The cheap query first: a watermark that far is rare.
        if exists (select from watermarks m
                   where m.consumer = any (p_consumers) and m.xid >= any (p_xids)) then
            select c.id into lost
            from unnest(p_consumers, p_consumed, p_xids, p_positions) as c (consumer, id, xid, position)
            join watermarks m on m.consumer = c.consumer and (m.xid, m.position) >= (c.xid, c.position)
            limit 1;
            if found then
                raise exception '%', lost using errcode = 'HR004';
            end if;
        end if;
    end if;
    -- Finished, under the claims that the worker still holds.
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
    -- A run that closes needs none of its effects; in the order of ids, as others lock them.
    if 'closed' = any (g_state) then
        delete from effects where id in (
            select e.id from effects e
            where e.run_id in (select g.run from unnest(g_run, g_state) as g (run, state)
                               where g.state = 'closed')
            order by e.id for update);
    end if;
    -- Streams move from the version that was read. One that gets no event must still have it, and keep it until
    -- this transaction ends. One that does not exist gets a row with version 0, so that a transaction that
    -- creates the stream meets it.
    for i in 1 .. cardinality(p_streams) loop
        if p_expected[i] = 0 and p_versions[i] > 0 then
            insert into streams as s (stream, version) values (p_streams[i], p_versions[i])
            on conflict (stream) do update set version = excluded.version where s.version = 0;
        elsif p_versions[i] > p_expected[i] then
            update streams set version = p_versions[i]
            where stream = p_streams[i] and version = p_expected[i];
        else
            if p_expected[i] = 0 then
                insert into streams (stream, version) values (p_streams[i], 0)
                on conflict do nothing;
                continue when found;
            end if;
            perform from streams
            where stream = p_streams[i] and version = p_expected[i] for share;
        end if;
        if not found then
            raise exception '%', p_streams[i] using errcode = 'HR001';
        end if;
    end loop;
    -- Effects, but none in the name of a closed run: nobody would ever claim it.
    if cardinality(f_id) > 0 then
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
        if g_state[i] = 'reopened' then
            update run_gates set state = 'open' where run_id = g_run[i] and state = 'closed';
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
                            correlation, traceparent, actor)
        select e.id, e.stream, e.version, e.type, e.schema, e.data::json, e.run, e.causation,
               e.correlation, e.trace, e.actor
        from unnest(e_id, e_stream, e_version, e_type, e_schema, e_data, e_run, e_causation,
                    e_correlation, e_trace, e_actor)
             with ordinality
             as e (id, stream, version, type, schema, data, run, causation, correlation, trace, actor, n)
        order by e.n
        returning events.position, events.xid, events.time;
end $$;

-- Which attempts of its row the samples of a group are, if it was requested again: a JSON list. An evaluation that
-- is retried requests the failed attempts only.
alter table graded_groups add column attempts text;
