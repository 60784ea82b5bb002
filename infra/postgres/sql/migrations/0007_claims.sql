-- Claims that cost as much as they take, however many effects wait or are held.

-- Waiting effects in the order in which they are claimed, for who performs a lane of a consumer; an
-- effect that is due later is not met before its time.
drop index effects_claimable;
create index effects_ready on effects (lane, consumer, due_at, created) where worker is null;
-- Held ones: who died is found by going from holder to holder.
create index effects_held on effects (worker) where worker is not null;

-- Claim due effects: the worker's lease is live, the gate open and the run not held, and nobody else with
-- a live lease holds them. Taking over from a dead worker counts a crash, and comes first; what this
-- worker holds already is not claimed again, even if its lease ran out meanwhile. Of several queues (a
-- lane of a consumer each) the one whose head is due the longest goes first.
--
-- The settings and the subqueries fix the plans: a session keeps the one it made when the table was
-- empty. `(select clock_timestamp())` is asked once, after the snapshot, so an index can compare with it
-- and nothing that the snapshot shows is taken to lie in the future.
drop function claim_effects(text, text[], text[], integer);
create function claim_effects(p_worker text, p_lanes text[], p_consumers text[], p_limit integer)
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
        return query
            with picked as materialized (
                select c.id from effects c
                where c.worker = dead
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
            where e.worker is null and e.lane = q.lane and e.consumer = q.consumer
              and e.due_at <= (select clock_timestamp())
            order by e.due_at, e.created limit 1
        ) head
        order by head.due_at, head.created
    loop
        exit when room = 0;
        return query
            with picked as materialized (
                select c.id from effects c
                where c.worker is null and c.lane = queue.lane and c.consumer = queue.consumer
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
