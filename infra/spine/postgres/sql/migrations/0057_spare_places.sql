-- A lane whose places are all taken has spare ones, for runs that hold few of them.

create function claim_spare(
    p_worker text, p_lane text, p_consumers text[], p_room integer, p_few integer
)
returns setof effects language sql
set enable_seqscan = off set enable_bitmapscan = off as $$
    with own as materialized (
        select w.decider from workers w where w.id = p_worker and w.expires_at > clock_timestamp()
    ), heads as materialized (
        select c.* from own o cross join unnest(p_consumers) as n (consumer) cross join lateral (
            select e.ctid as place, e.run_id, e.size, e.turn, e.created from effects e
            where e.worker is null and not e.shut and not e.later
              and e.lane = p_lane and e.consumer = n.consumer
              and e.due_at <= (select clock_timestamp())
              and coalesce((select g.state = 'open' and g.holds = 0 and g.decider <= o.decider
                            from run_gates g where g.run_id = e.run_id), true)
            order by e.turn, e.created limit 64) c
    ), held as materialized (
        select e.run_id, sum(e.size) as places from effects e
        where e.worker = p_worker and e.lane || '' = p_lane group by e.run_id
    ), few as (
        select n.* from (
            select c.*, coalesce(h.places, 0)
                        + sum(c.size) over (partition by c.run_id order by c.turn, c.created) as of_run
            from heads c left join held h on h.run_id = c.run_id) n
        where n.of_run <= p_few
    ), next as materialized (
        select f.place from (
            select f.place, sum(f.size) over (order by f.turn, f.created) as together from few f) f
        where f.together <= p_room
    ), picked as materialized (
        select e.ctid as place from effects e
        where e.ctid = any (array(select n.place from next n)) and e.worker is null and not e.shut
        for update skip locked
    )
    update effects e
    set worker = p_worker, epoch = e.epoch + 1
    where e.ctid = any (array(select p.place from picked p))
    returning e.*
$$;

create function claim_in_turn(
    p_worker text, p_lanes text[], p_consumers text[], p_room integer[], p_generation integer, p_most integer[],
    p_samples bigint, p_spare integer[]
) returns setof effects language plpgsql as $$
declare
    taken effects;
begin
    for taken in
        select * from claim_in_turn(p_worker, p_lanes, p_consumers, p_room, p_generation, p_most, p_samples)
    loop
        return next taken;
        p_room[array_position(p_lanes, taken.lane)] := p_room[array_position(p_lanes, taken.lane)] - taken.size;
    end loop;
    if p_samples is not null or exists (
            select from workspace_quotas q where q.name = 'samples_in_flight' and q.most is not null) then
        return;
    end if;
    return query select found.* from unnest(p_lanes, p_room, p_spare, p_most) as l (lane, room, spare, most)
        cross join lateral claim_spare(p_worker, l.lane, p_consumers, l.spare + least(l.room, 0), l.spare) found
        where l.spare + least(l.room, 0) > 0 and l.most is null;
end $$;
