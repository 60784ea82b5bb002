-- A claim of samples asks the workspaces, and not the runs.

alter table effects add column workspace text not null default '';
update effects e set workspace = g.workspace
    from run_gates g where g.run_id = e.run_id and g.workspace is not null and e.lane = 'generate';
create index effects_samples on effects (consumer, workspace, turn, created)
    where lane = 'generate' and worker is null and not shut and not later;
drop index effects_held;
create index effects_held on effects (worker, workspace) where worker is not null;

create or replace function note_workspace() returns trigger language plpgsql as $$
declare
    owner text := coalesce(new.data ->> 'evaluation', new.data ->> 'run');
    found_workspace text := coalesce(new.data ->> 'workspace', new.data ->> 'belongs_to', (
        select g.workspace from run_gates g where g.run_id = new.run_id));
begin
    if found_workspace is not null then
        insert into run_gates as g (run_id, state, workspace) values (owner, 'open', found_workspace)
        on conflict (run_id) do update set workspace = excluded.workspace;
        -- Samples that the same decision requested, before its events were written.
        update effects e set workspace = found_workspace where e.run_id = owner and e.lane = 'generate';
    end if;
    return null;
end $$;

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
                             traceparent, worker, epoch, shut, size, turn, workspace)
        with asked as materialized (
            select f.*, coalesce(f.given, 1) as size from unnest(
                f_id, f_consumer, f_stream, f_lane, f_run, f_type, f_data, f_correlation, f_trace,
                f_claimed, f_size) with ordinality
                as f (id, consumer, stream, lane, run, type, data, correlation, trace, claimed, given, n)
        ), shares as materialized (
            select s.run, s.lane, s.consumer, next_turn(s.run, s.lane, s.consumer) as turn,
                   coalesce(g.weight, 1) as weight,
                   case when s.lane = 'generate' then coalesce(g.workspace, '') else '' end as workspace
            from (select distinct a.run, a.lane, a.consumer from asked a) s
            left join run_gates g on g.run_id = s.run
        )
        select a.id, a.consumer, a.stream, a.lane, a.run, a.type, a.data::json, a.correlation,
               a.trace, case when a.claimed then p_worker end, case when a.claimed then 1 else 0 end,
               coalesce(a.run = any (resting), false), a.size,
               s.turn + sum(a.size) over (partition by a.run, a.lane order by a.n)::float8 / s.weight,
               s.workspace
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

create or replace function sample_limit(p_workspace text, p_most bigint) returns bigint language plpgsql stable as $$
declare
    own_most bigint;
begin
    if coalesce(p_workspace, '') = '' then
        return null;
    end if;
    select q.most into own_most from workspace_quotas q
    where q.workspace = p_workspace and q.name = 'samples_in_flight';
    return case when found then own_most else p_most end;
end $$;

create function claim_samples(
    p_worker text, p_decider integer, p_consumer text, p_room integer, p_samples bigint
)
returns setof effects language sql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_sort = off as $$
    with recursive holders (name) as (
        (select e.worker from effects e where e.worker is not null order by e.worker limit 1)
        union all
        select (select e.worker from effects e where e.worker > h.name order by e.worker limit 1)
        from holders h where h.name is not null
    ), spaces (workspace) as (
        (select e.workspace from effects e
         where e.lane = 'generate' and e.worker is null and not e.shut and not e.later and e.consumer = p_consumer
         order by e.workspace limit 1)
        union all
        select (select e.workspace from effects e
                where e.lane = 'generate' and e.worker is null and not e.shut and not e.later
                  and e.consumer = p_consumer and e.workspace > s.workspace
                order by e.workspace limit 1)
        from spaces s where s.workspace is not null
    ), heads as materialized (
        select s.workspace, head.turn, head.created
        from spaces s cross join lateral (
            select e.turn, e.created from effects e
            where e.lane = 'generate' and e.worker is null and not e.shut and not e.later
              and e.consumer = p_consumer and e.workspace = s.workspace
              and e.due_at <= (select clock_timestamp())
              and coalesce((select g.state = 'open' and g.holds = 0 and g.decider <= p_decider
                            from run_gates g where g.run_id = e.run_id), true)
            order by e.turn, e.created limit 1) head
        order by head.turn, head.created
    ), free as materialized (
        select h.workspace, l.most, t.together, row_number() over () as rank
        from heads h
        cross join lateral (select sample_limit(h.workspace, p_samples) as most offset 0) l
        cross join lateral (
            select coalesce(sum(c.size), 0) as together from (
                select o.size from holders w cross join lateral (
                    select e.size from effects e
                    where e.worker is not null and (e.worker, e.workspace) >= (w.name, h.workspace)
                      and (e.worker, e.workspace) <= (w.name, h.workspace)
                    order by e.worker, e.workspace limit l.most) o
                where l.most is not null limit l.most) c) t
        where l.most is null or t.together < l.most
        limit p_room
    ), next as materialized (
        select n.place from (
            select w.*, f.most, f.together
                        + sum(w.size) over (partition by f.workspace order by w.turn, w.created) as after
            from free f cross join lateral (
                select e.ctid as place, e.turn, e.created, e.size from effects e
                where e.lane = 'generate' and e.worker is null and not e.shut and not e.later
                  and e.consumer = p_consumer and e.workspace = f.workspace
                  and e.due_at <= (select clock_timestamp())
                  and coalesce((select g.state = 'open' and g.holds = 0 and g.decider <= p_decider
                                from run_gates g where g.run_id = e.run_id), true)
                order by e.turn, e.created limit least(p_room - f.rank + 1, f.most - f.together)) w) n
        where n.most is null or n.after <= n.most or n.after = n.size
        order by n.turn, n.created limit p_room
    ), picked as materialized (
        select e.ctid as place, e.size, e.turn, e.created from effects e
        where e.ctid = any (array(select n.place from next n)) and e.worker is null and not e.shut
        for update skip locked
    ), fitting as (
        select p.place, sum(p.size) over (order by p.turn, p.created) - p.size as before from picked p
    )
    update effects e
    set worker = p_worker, epoch = e.epoch + 1
    where e.ctid = any (array(select f.place from fitting f where f.before < p_room))
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
        if p_most[queue.n] is not null then
            for taken in
                select * from claim_for_runs(
                    p_worker, queue.lane, p_consumers, p_room[queue.n], p_most[queue.n], p_samples)
            loop
                return next taken;
                p_room[queue.n] := p_room[queue.n] - taken.size;
            end loop;
            continue;
        end if;
        if queue.lane = 'generate' and limits_samples then
            for taken in
                select * from claim_samples(
                    p_worker, own_decider, queue.consumer, p_room[queue.n], p_samples)
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
