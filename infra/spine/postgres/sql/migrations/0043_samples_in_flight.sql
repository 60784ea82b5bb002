-- A workspace has a quota of samples in flight.

alter table run_gates add column workspace text;
insert into run_gates as g (run_id, state, workspace)
    select r.run, 'open', r.workspace from runs r
    where r.workspace is not null and r.archived_at is null
    on conflict (run_id) do update set workspace = excluded.workspace;
insert into run_gates as g (run_id, state, workspace)
    select e.evaluation, 'open', coalesce(e.workspace, r.workspace)
    from evaluations e left join runs r on r.run = e.run
    where coalesce(e.workspace, r.workspace) is not null
    on conflict (run_id) do update set workspace = excluded.workspace;

-- The workspace of a run or an evaluation, noted when it is requested. An evaluation that a run requested has that of
-- the run.
create function note_workspace() returns trigger language plpgsql as $$
declare
    owner text := coalesce(new.data ->> 'evaluation', new.data ->> 'run');
    found_workspace text := coalesce(new.data ->> 'workspace', new.data ->> 'belongs_to', (
        select g.workspace from run_gates g where g.run_id = new.run_id));
begin
    if found_workspace is not null then
        insert into run_gates as g (run_id, state, workspace) values (owner, 'open', found_workspace)
        on conflict (run_id) do update set workspace = excluded.workspace;
    end if;
    return null;
end $$;
create trigger events_note_workspace after insert on events for each row
    when (new.type in ('rl.run.requested', 'rl.evaluation.requested')) execute function note_workspace();

drop function claim_in_turn(text, text[], text[], integer[], integer, integer[]);
drop function claim_within(text, text[], text[], integer[], integer[]);
drop function claim_for_runs(text, text, text[], integer, integer);

-- How many places of the lane `generate` the runs of a workspace may take together; null is without a limit.
-- p_most is the limit of a workspace that has none of its own.
create function sample_limit(p_workspace text, p_most bigint) returns bigint language plpgsql stable as $$
declare
    own_most bigint;
begin
    if p_workspace is null then
        return null;
    end if;
    select q.most into own_most from workspace_quotas q
    where q.workspace = p_workspace and q.name = 'samples_in_flight';
    return case when found then own_most else p_most end;
end $$;

-- Claim effects of a lane, of each run as long as it takes fewer than p_most places (null: without a limit), and of
-- each workspace as long as its samples in flight stay within its limit. An effect that is larger than that limit
-- is claimed when the workspace has nothing else in flight.
create function claim_for_runs(
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
          and coalesce(g.state = 'open' and g.holds = 0, true)
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

-- Claim due effects, of each lane as long as a place of p_room is left (an effect takes `size` places): the
-- worker's lease is live, the gate is open, the run is not held, and no other worker with a live lease holds them.
-- Effects that this worker already holds are not claimed again, even if its lease ran out meanwhile. What dead
-- workers held is given back first. It keeps its turn, and so does what was to be tried again later and is due now.
-- Of several queues (one per lane and consumer) the one whose head has the smallest turn goes first.
--
-- p_most has, for each lane, how many places one run may take of it in all workers, or null. p_samples is how many
-- samples in flight a workspace may have that has no such quota of its own, or null. With such a limit the runs are
-- asked one by one, because an index scan in the order of turns would meet all effects of a run that is at its limit.
-- Such claims of a lane exclude each other, so that two of them never fill the same place.
--
-- The settings and the subqueries fix the plans, because a session keeps the plan that it made when the table was
-- empty. `(select clock_timestamp())` is evaluated once, after the snapshot, so that an index can compare with it
-- and nothing that the snapshot shows is taken to lie in the future. What was picked is locked, so it is updated where
-- it lies in the table, without another look into an index.
create function claim_within(
    p_worker text, p_lanes text[], p_consumers text[], p_room integer[], p_most integer[],
    p_samples bigint
)
returns setof effects language plpgsql
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    dead text;
    queue record;
    taken effects;
    limits_samples boolean := p_samples is not null or exists (
        select from workspace_quotas q where q.name = 'samples_in_flight' and q.most is not null);
begin
    if not exists (select from workers w where w.id = p_worker and w.expires_at > clock_timestamp()) then
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
                  and coalesce((select g.state = 'open' and g.holds = 0
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

-- Claim under the generation that the worker believes in: raises HR003 when that one is over. It takes an advisory
-- lock and not a row lock, because a claim that finds nothing must take no transaction id, and a lease is renewed
-- meanwhile.
create function claim_in_turn(
    p_worker text, p_lanes text[], p_consumers text[], p_room integer[], p_generation integer, p_most integer[],
    p_samples bigint
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
    return query select * from claim_within(p_worker, p_lanes, p_consumers, p_room, p_most, p_samples);
end $$;

-- The same without limits of runs or workspaces, for processes of versions before, which still run during an upgrade.
create or replace function claim_in_turn(p_worker text, p_lanes text[], p_consumers text[], p_room integer[])
returns setof effects language sql as $$
    select * from claim_within(p_worker, p_lanes, p_consumers, p_room, null, null)
$$;
create or replace function claim_in_turn(
    p_worker text, p_lanes text[], p_consumers text[], p_room integer[], p_generation integer
) returns setof effects language sql as $$
    select * from claim_in_turn(p_worker, p_lanes, p_consumers, p_room, p_generation, null, null)
$$;
create function claim_in_turn(
    p_worker text, p_lanes text[], p_consumers text[], p_room integer[], p_generation integer, p_most integer[]
) returns setof effects language sql as $$
    select * from claim_in_turn(p_worker, p_lanes, p_consumers, p_room, p_generation, p_most, null)
$$;
