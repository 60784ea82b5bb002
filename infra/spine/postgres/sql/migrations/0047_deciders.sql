-- A run needs a decider version of the processes that work on it, and a worker says which one it has.

alter table run_gates add column decider integer not null default 1;
create index gates_newer on run_gates (decider) where decider > 1;
alter table workers add column decider integer not null default 1;

create function has_unfinished(p_lanes text[], p_consumers text[], p_decider integer) returns boolean
language sql stable set enable_seqscan = off set enable_bitmapscan = off as $$
    select exists (
        select from unnest(p_lanes) l (lane) cross join unnest(p_consumers) c (consumer)
        cross join lateral (
            (select from effects e
             where e.worker is null and not e.shut and not e.later
               and e.lane = l.lane and e.consumer = c.consumer
               and not exists (select from run_gates g where g.run_id = e.run_id
                               and (g.state <> 'open' or g.holds > 0 or g.decider > p_decider))
             order by e.turn limit 1)
            union all
            (select from effects e
             where e.worker is null and not e.shut and e.later
               and e.lane = l.lane and e.consumer = c.consumer
               and not exists (select from run_gates g where g.run_id = e.run_id
                               and (g.state <> 'open' or g.holds > 0 or g.decider > p_decider))
             order by e.due_at limit 1)
        ) waiting
    ) or exists (
        select from unnest(p_lanes) l (lane)
        cross join lateral (
            select from effects e
            where e.worker is not null and e.lane = l.lane and e.consumer = any (p_consumers)
              and not exists (select from run_gates g where g.run_id = e.run_id
                              and (g.state <> 'open' or g.holds > 0 or g.decider > p_decider))
            order by e.turn limit 1
        ) held
    )
$$;

-- The same for processes of the version before, which still run during an upgrade.
create or replace function has_unfinished(p_lanes text[], p_consumers text[]) returns boolean
language sql stable as $$ select has_unfinished(p_lanes, p_consumers, 1) $$;

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
    e_actor text[], f_size integer[], w_run text[], w_weight integer[]
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
    if cardinality(w_run) > 0 then
        insert into run_gates as g (run_id, state, weight)
        select w.run, 'open', w.weight from unnest(w_run, w_weight) as w (run, weight) order by w.run
        on conflict (run_id) do update set weight = excluded.weight;
    end if;
    -- Effects, but none in the name of a closed run: nobody would ever claim it. The turns of a run in a lane
    -- follow each other, and none lies before the turn of the lane. Both are read without a lock: of two
    -- decisions at the same moment each may not see the turns of the other.
    if cardinality(f_id) > 0 then
        insert into effects (id, consumer, stream, lane, run_id, type, data, correlation,
                             traceparent, worker, epoch, shut, size, turn)
        with asked as materialized (
            select f.*, coalesce(f.given, 1) as size from unnest(
                f_id, f_consumer, f_stream, f_lane, f_run, f_type, f_data, f_correlation, f_trace,
                f_claimed, f_size) with ordinality
                as f (id, consumer, stream, lane, run, type, data, correlation, trace, claimed, given, n)
        ), shares as materialized (
            select s.run, s.lane, s.consumer, next_turn(s.run, s.lane, s.consumer) as turn,
                   coalesce((select g.weight from run_gates g where g.run_id = s.run), 1) as weight
            from (select distinct a.run, a.lane, a.consumer from asked a) s
        )
        select a.id, a.consumer, a.stream, a.lane, a.run, a.type, a.data::json, a.correlation,
               a.trace, case when a.claimed then p_worker end, case when a.claimed then 1 else 0 end,
               coalesce(a.run = any (resting), false), a.size,
               s.turn + sum(a.size) over (partition by a.run, a.lane order by a.n)::float8 / s.weight
        from asked a join shares s using (run, lane, consumer)
        where not exists (select from run_gates g where g.run_id = a.run and g.state = 'closed')
        order by a.n
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
        if g_state[i] like 'decider %' then
            insert into run_gates as g (run_id, state, decider)
            values (g_run[i], 'open', substr(g_state[i], 9)::integer)
            on conflict (run_id) do update set decider = excluded.decider;
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

create or replace function claim_for_runs(
    p_worker text, p_lane text, p_consumers text[], p_room integer, p_most integer, p_samples bigint
)
returns setof effects language sql
set enable_seqscan = off set enable_bitmapscan = off as $$
    with recursive runs (run_id) as (
        (select e.run_id from effects e order by e.run_id limit 1)
        union all
        select (select e.run_id from effects e where e.run_id > r.run_id order by e.run_id limit 1)
        from runs r where r.run_id is not null
    ), held as materialized (
        select e.run_id, sum(e.size) as places from effects e
        where e.lane = p_lane and e.worker is not null group by e.run_id
    ), taken as materialized (
        select g.workspace, sum(h.places) as places from held h join run_gates g on g.run_id = h.run_id
        where g.workspace is not null group by g.workspace
    ), free as materialized (
        select r.run_id, g.workspace, coalesce(h.places, 0) as places, coalesce(t.places, 0) as together, l.most
        from runs r
        left join run_gates g on g.run_id = r.run_id
        left join held h on h.run_id = r.run_id
        left join taken t on t.workspace = g.workspace
        cross join lateral (
            select case when p_lane = 'generate' then sample_limit(g.workspace, p_samples) end as most) l
        where r.run_id is not null
          and coalesce(g.state = 'open' and g.holds = 0 and g.decider <= (
                  select v.decider from workers v where v.id = p_worker), true)
          and (p_most is null or coalesce(h.places, 0) < p_most)
          and (l.most is null or coalesce(t.places, 0) < l.most)
    ), waiting as (
        select w.*, f.workspace, f.together, f.most,
               f.places + sum(w.size) over (partition by f.run_id order by w.turn, w.created) - w.size as before
        from free f
        cross join lateral (
            select c.id, c.turn, c.created, c.size from effects c
            where c.run_id = f.run_id and c.lane = p_lane and c.consumer = any (p_consumers)
              and c.worker is null and not c.shut and not c.later
              and c.due_at <= (select clock_timestamp())
            order by c.turn limit least(p_room, p_most, f.most - f.together)::bigint) w
    ), next as materialized (
        select n.id from (
            select w.*, w.together + sum(w.size) over (partition by w.workspace order by w.turn, w.created) as after
            from waiting w where p_most is null or w.before < p_most
        ) n
        where n.most is null or n.after <= n.most or n.after = n.size
        order by n.turn, n.created limit p_room
    ), picked as materialized (
        select c.id, c.size, c.turn, c.created from effects c
        where c.id in (select n.id from next n) for update skip locked
    ), fitting as (
        select p.id, sum(p.size) over (order by p.turn, p.created) - p.size as before from picked p
    )
    update effects e
    set worker = p_worker, epoch = e.epoch + 1
    from fitting f where e.id = f.id and f.before < p_room
    returning e.*
$$;

create or replace function claim_within(
    p_worker text, p_lanes text[], p_consumers text[], p_room integer[], p_most integer[],
    p_samples bigint
)
returns setof effects language plpgsql
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    dead text;
    queue record;
    taken effects;
    own_decider integer;
    limits_samples boolean := p_samples is not null or exists (
        select from workspace_quotas q where q.name = 'samples_in_flight' and q.most is not null);
begin
    select w.decider into own_decider from workers w
    where w.id = p_worker and w.expires_at > clock_timestamp();
    if not found then
        return;
    end if;
    perform pg_advisory_xact_lock(hashtext('headrace run limits'), hashtext(l.lane))
    from (select p.lane from unnest(p_lanes, p_most) as p (lane, most)
          where p.most is not null or p.lane = 'generate' and limits_samples order by p.lane) l;
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
        perform give_back_effects(dead);
    end loop;
    update effects e set later = false
    where e.id in (select c.id from effects c
                   where c.worker is null and not c.shut and c.later
                     and c.lane = any (p_lanes) and c.consumer = any (p_consumers)
                     and c.due_at <= (select clock_timestamp())
                   limit 1000 for update skip locked);
    for queue in
        select q.n, q.lane, q.consumer
        from (select l.lane, l.n, c.consumer
              from unnest(p_lanes) with ordinality as l (lane, n)
              cross join unnest(p_consumers) as c (consumer)) q
        cross join lateral (
            select e.turn, e.created from effects e
            where e.worker is null and not e.shut and not e.later
              and e.lane = q.lane and e.consumer = q.consumer
              and e.due_at <= (select clock_timestamp())
            order by e.turn, e.created limit 1
        ) head
        order by head.turn, head.created
    loop
        continue when p_room[queue.n] <= 0;
        if p_most[queue.n] is not null or queue.lane = 'generate' and limits_samples then
            for taken in
                select * from claim_for_runs(
                    p_worker, queue.lane, p_consumers, p_room[queue.n], p_most[queue.n], p_samples)
            loop
                return next taken;
                p_room[queue.n] := p_room[queue.n] - taken.size;
            end loop;
            continue;
        end if;
        for taken in
            with picked as materialized (
                select c.ctid as place, c.size, c.turn, c.created from effects c
                where c.worker is null and not c.shut and not c.later
                  and c.lane = queue.lane and c.consumer = queue.consumer
                  and c.due_at <= (select clock_timestamp())
                  and coalesce((select g.state = 'open' and g.holds = 0 and g.decider <= own_decider
                                from run_gates g where g.run_id = c.run_id), true)
                order by c.turn, c.created
                limit p_room[queue.n]
                for update skip locked
            ), fitting as (
                select p.place, sum(p.size) over (order by p.turn, p.created) - p.size as before from picked p
            )
            update effects e
            set worker = p_worker, epoch = e.epoch + 1
            where e.ctid = any (array(select f.place from fitting f where f.before < p_room[queue.n]))
            returning e.*
        loop
            return next taken;
            p_room[queue.n] := p_room[queue.n] - taken.size;
        end loop;
    end loop;
end $$;
