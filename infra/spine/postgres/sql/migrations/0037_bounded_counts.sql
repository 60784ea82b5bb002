-- Counts of effects whose cost does not grow with the effects that wait.

-- Whether effects of these lanes and consumers wait (some for a later time) or are claimed. Those of runs that are
-- paused, held or closed do not count.
create function has_unfinished(p_lanes text[], p_consumers text[]) returns boolean
language sql stable set enable_seqscan = off set enable_bitmapscan = off as $$
    select exists (
        select from unnest(p_lanes) l (lane) cross join unnest(p_consumers) c (consumer)
        cross join lateral (
            (select from effects e
             where e.worker is null and not e.shut and not e.later
               and e.lane = l.lane and e.consumer = c.consumer
               and not exists (select from run_gates g where g.run_id = e.run_id
                               and (g.state <> 'open' or g.holds > 0))
             order by e.turn limit 1)
            union all
            (select from effects e
             where e.worker is null and not e.shut and e.later
               and e.lane = l.lane and e.consumer = c.consumer
               and not exists (select from run_gates g where g.run_id = e.run_id
                               and (g.state <> 'open' or g.holds > 0))
             order by e.due_at limit 1)
        ) waiting
    ) or exists (
        select from unnest(p_lanes) l (lane)
        cross join lateral (
            select from effects e
            where e.worker is not null and e.lane = l.lane and e.consumer = any (p_consumers)
              and not exists (select from run_gates g where g.run_id = e.run_id
                              and (g.state <> 'open' or g.holds > 0))
            order by e.turn limit 1
        ) held
    )
$$;

-- The effects of each lane that has any: how many wait, counted up to p_most, how many are claimed under a live
-- lease, and since when the longest of those waits that are next in the queue of their consumer. What a dead worker
-- holds waits too. Paused runs do not count.
create function count_effects(p_most integer)
returns table (r_lane text, r_waiting integer, r_claimed integer, r_oldest_s double precision)
language sql stable set enable_seqscan = off set enable_bitmapscan = off as $$
    with recursive ready (lane, consumer) as (
        (select e.lane, e.consumer from effects e where e.worker is null and not e.shut and not e.later
         order by e.lane, e.consumer limit 1)
        union all
        select n.lane, n.consumer from ready r cross join lateral (
            select e.lane, e.consumer from effects e where e.worker is null and not e.shut and not e.later
              and (e.lane, e.consumer) > (r.lane, r.consumer)
            order by e.lane, e.consumer limit 1) n
    ), later (lane, consumer) as (
        (select e.lane, e.consumer from effects e where e.worker is null and not e.shut and e.later
         order by e.lane, e.consumer limit 1)
        union all
        select n.lane, n.consumer from later r cross join lateral (
            select e.lane, e.consumer from effects e where e.worker is null and not e.shut and e.later
              and (e.lane, e.consumer) > (r.lane, r.consumer)
            order by e.lane, e.consumer limit 1) n
    ), found (lane, waiting, claimed, due_at) as (
        select r.lane, c.number, 0, case when h.due_at <= clock_timestamp() then h.due_at end from ready r
        cross join lateral (
            select e.due_at from effects e
            where e.worker is null and not e.shut and not e.later
              and e.lane = r.lane and e.consumer = r.consumer
            order by e.turn, e.created limit 1) h
        cross join lateral (
            select count(*) as number from (
                select from effects e
                where e.worker is null and not e.shut and not e.later
                  and e.lane = r.lane and e.consumer = r.consumer limit p_most) one) c
        union all
        select r.lane, c.number, 0, case when h.due_at <= clock_timestamp() then h.due_at end from later r
        cross join lateral (
            select e.due_at from effects e
            where e.worker is null and not e.shut and e.later
              and e.lane = r.lane and e.consumer = r.consumer
            order by e.due_at limit 1) h
        cross join lateral (
            select count(*) as number from (
                select from effects e
                where e.worker is null and not e.shut and e.later
                  and e.lane = r.lane and e.consumer = r.consumer limit p_most) one) c
        union all
        select e.lane, count(*) - count(w.id), count(w.id),
               min(e.due_at) filter (where w.id is null and not e.shut)
        from effects e left join workers w on w.id = e.worker and w.expires_at > clock_timestamp()
        where e.worker is not null group by e.lane
    )
    select f.lane, least(sum(f.waiting), p_most)::integer, sum(f.claimed)::integer,
           extract(epoch from clock_timestamp() - min(f.due_at))::float8
    from found f group by f.lane order by f.lane
$$;
