-- Runs take turns: start-time fair queuing of effects.

-- How large the share of a run is, next to those of other runs.
alter table run_gates add column weight integer not null default 1;

-- `turn` says when an effect is to be claimed, `size` how many places it takes, and `later` that it is not due
-- before `due_at`.
alter table effects
    add column turn  double precision not null default 0,
    add column size  integer not null default 1,
    add column later boolean not null default false;
update effects set later = true where worker is null and due_at > clock_timestamp();
drop index effects_ready;
drop index effects_run;
-- What can be claimed, in the order in which it is claimed, and what is to be tried again later.
create index effects_ready on effects (lane, consumer, turn, created)
    where worker is null and not shut and not later;
create index effects_later on effects (lane, consumer, due_at)
    where worker is null and not shut and later;
-- What is performed, by its turn.
create index effects_performed on effects (lane, turn) where worker is not null;
-- The last turn of a run in a lane.
create index effects_run on effects (run_id, lane, turn);

-- The turn of a lane: the largest of what is performed, else that of the next effect of this consumer that can be
-- claimed or will be due, else 0. A lane without work begins again, so nobody saves up turns while it idles.
create function lane_turn(p_lane text, p_consumer text) returns double precision
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off as $$
begin
    return coalesce(
        (select e.turn from effects e where e.lane = p_lane and e.worker is not null
         order by e.turn desc limit 1),
        (select e.turn from effects e
         where e.lane = p_lane and e.consumer = p_consumer and e.worker is null and not e.shut and not e.later
         order by e.turn, e.created limit 1),
        (select e.turn from effects e
         where e.lane = p_lane and e.consumer = p_consumer and e.worker is null and not e.shut and e.later
         order by e.due_at limit 1),
        0);
end $$;

-- The turn after which the effects that a run requests in a lane come: start-time fair queuing. A run that has
-- requested much comes after those that have not, and one that has slept has no advantage.
create function next_turn(p_run text, p_lane text, p_consumer text) returns double precision
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off as $$
begin
    return greatest(lane_turn(p_lane, p_consumer), (
        select e.turn from effects e where e.run_id = p_run and e.lane = p_lane
        order by e.turn desc limit 1));
end $$;

create or replace function shut_effects() returns trigger language plpgsql as $$
begin
    if new.state = 'paused' or new.holds > 0 then
        update effects e set shut = true
        where e.id in (select c.id from effects c where c.run_id = new.run_id and not c.shut
                       for update skip locked);
    else
        -- They come after what is performed now. The turns that they had are of another time.
        update effects e set shut = false, turn = o.turn
        from (select c.id, l.turn + sum(c.size) over (partition by c.lane order by c.turn, c.created)::float8
                                    / new.weight as turn
              from effects c
              join (select d.lane, d.consumer, lane_turn(d.lane, d.consumer) as turn
                    from (select distinct f.lane, f.consumer from effects f
                          where f.run_id = new.run_id and f.shut) d) l using (lane, consumer)
              where c.run_id = new.run_id and c.shut) o
        where e.id = o.id;
    end if;
    return null;
end $$;

create function commit_decision(
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

-- What a process of the version before calls while this one is applied.
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
language sql as $$
    select * from commit_decision(
        p_worker, p_consumers, p_consumed, p_xids, p_positions, p_finished, p_epochs, p_streams,
        p_expected, p_versions, e_id, e_stream, e_version, e_type, e_schema, e_data, e_run, e_causation,
        e_correlation, e_trace, f_id, f_consumer, f_stream, f_lane, f_run, f_type, f_data,
        f_correlation, f_trace, f_claimed, a_sha, a_data, g_run, g_state, e_actor,
        '{}', '{}', '{}')
$$;

-- The version before the last one.
drop function commit_decision(
    text, text[], uuid[], xid8[], bigint[], uuid[], integer[], text[], integer[], integer[], uuid[], text[],
    integer[], text[], integer[], text[], text[], uuid[], uuid[], text[], uuid[], text[], text[], text[],
    text[], text[], text[], uuid[], text[], boolean[], text[], bytea[], text[], text[]);

-- Claim due effects, of each lane as long as a place of p_room is left (an effect takes `size` places): the
-- worker's lease is live, the gate is open, the run is not held, and no other worker with a live lease holds them.
-- Effects that this worker already holds are not claimed again, even if its lease ran out meanwhile. What a dead
-- worker held is given back first, counts a crash, and is claimed in its turn, which it keeps. So is what was to be
-- tried again later and is due now. Of several queues (one per lane and consumer) the one whose head has the
-- smallest turn goes first.
--
-- The settings and the subqueries fix the plans, because a session keeps the plan that it made when the table was
-- empty. `(select clock_timestamp())` is evaluated once, after the snapshot, so that an index can compare with it
-- and nothing that the snapshot shows is taken to lie in the future.
create function claim_in_turn(p_worker text, p_lanes text[], p_consumers text[], p_room integer[])
returns setof effects language plpgsql
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    dead text;
    queue record;
    taken effects;
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
        update effects e set worker = null, crashes = e.crashes + 1
        where e.id in (select c.id from effects c
                       where c.worker = dead
                         and (c.shut or c.lane = any (p_lanes) and c.consumer = any (p_consumers))
                       for update skip locked);
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
        for taken in
            with picked as materialized (
                select c.id, c.size, c.turn, c.created from effects c
                where c.worker is null and not c.shut and not c.later
                  and c.lane = queue.lane and c.consumer = queue.consumer
                  and c.due_at <= (select clock_timestamp())
                  and coalesce((select g.state = 'open' and g.holds = 0
                                from run_gates g where g.run_id = c.run_id), true)
                order by c.turn, c.created
                limit p_room[queue.n]
                for update skip locked
            ), fitting as (
                select p.id, sum(p.size) over (order by p.turn, p.created) - p.size as before from picked p
            )
            update effects e
            set worker = p_worker, epoch = e.epoch + 1
            from fitting f where e.id = f.id and f.before < p_room[queue.n]
            returning e.*
        loop
            return next taken;
            p_room[queue.n] := p_room[queue.n] - taken.size;
        end loop;
    end loop;
end $$;

-- Claim under the generation that the worker believes in: raises HR003 when that one is over. It takes an advisory
-- lock and not a row lock, because a claim that finds nothing must take no transaction id, and a lease is renewed
-- meanwhile.
create function claim_in_turn(
    p_worker text, p_lanes text[], p_consumers text[], p_room integer[], p_generation integer
) returns setof effects language plpgsql as $$
declare
    known integer;
begin
    perform pg_advisory_xact_lock_shared(hashtext('headrace claims'), hashtext(p_worker));
    select w.generation into known from workers w
    where w.id = p_worker and w.expires_at > clock_timestamp();
    if not found then
        return;
    end if;
    if known <> p_generation then
        raise exception 'generation % is over', p_generation using errcode = 'HR003';
    end if;
    return query select * from claim_in_turn(p_worker, p_lanes, p_consumers, p_room);
end $$;

-- What processes of the version before call, which still run during an upgrade. They hold one number of effects of
-- any lane.
create or replace function claim_effects(p_worker text, p_lanes text[], p_consumers text[], p_limit integer)
returns setof effects language sql as $$
    select * from claim_in_turn(p_worker, p_lanes, p_consumers, array_fill(p_limit, array[cardinality(p_lanes)]))
$$;
create or replace function claim_effects(
    p_worker text, p_lanes text[], p_consumers text[], p_limit integer, p_generation integer
) returns setof effects language sql as $$
    select * from claim_in_turn(
        p_worker, p_lanes, p_consumers, array_fill(p_limit, array[cardinality(p_lanes)]), p_generation)
$$;

select grant_processes();
