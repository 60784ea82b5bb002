-- The death of a worker counts one crash, however many effects it held.

-- How many workers died while they held it. `crashes` counts those deaths for which it is blamed.
alter table effects add column deaths integer not null default 0;
update effects set deaths = crashes where crashes > 0;

-- Give back what a dead worker held. Its death counts one crash. Nobody saw which effect caused it, so the one that
-- most workers died with is blamed. An effect that outlives two deaths takes twice as many places, and twice as many
-- again after each further one. So it is performed beside ever fewer others, at last alone, and an effect that ends
-- its workers is soon the only one to blame. One claim at a time gives back, so that no death counts twice.
create function give_back_effects(p_dead text) returns void language plpgsql
set enable_seqscan = off set enable_bitmapscan = off as $$
begin
    if not pg_try_advisory_xact_lock(hashtext('headrace deaths'), hashtext(p_dead)) then
        return;
    end if;
    with held as materialized (
        select e.id, e.deaths, e.crashes, e.turn, e.created from effects e
        where e.worker = p_dead for update skip locked
    ), blamed as (
        select h.id from held h order by h.deaths desc, h.crashes, h.turn, h.created limit 1
    )
    update effects e
    set worker = null, deaths = e.deaths + 1,
        size = e.size * case when e.deaths between 1 and 16 then 2 else 1 end,
        crashes = e.crashes + (e.id = (select b.id from blamed b))::integer
    from held h where e.id = h.id;
end $$;

-- Claim due effects, of each lane as long as a place of p_room is left (an effect takes `size` places): the
-- worker's lease is live, the gate is open, the run is not held, and no other worker with a live lease holds them.
-- Effects that this worker already holds are not claimed again, even if its lease ran out meanwhile. What dead
-- workers held is given back first. It keeps its turn, and so does what was to be tried again later and is due now.
-- Of several queues (one per lane and consumer) the one whose head has the smallest turn goes first.
--
-- The settings and the subqueries fix the plans, because a session keeps the plan that it made when the table was
-- empty. `(select clock_timestamp())` is evaluated once, after the snapshot, so that an index can compare with it
-- and nothing that the snapshot shows is taken to lie in the future.
create or replace function claim_in_turn(p_worker text, p_lanes text[], p_consumers text[], p_room integer[])
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
