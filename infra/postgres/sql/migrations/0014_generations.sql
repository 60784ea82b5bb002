-- A claim that a network delivers late takes nothing.

-- How often a worker has given back claims that it does not know of. Each claim names the generation that
-- its worker believes in: one that was sent before, and arrives after, is of a generation that is over.
alter table workers add column generation integer not null default 0;

-- Give back what a worker holds beyond `p_keep`, and raise its generation; returns the new one, or null with
-- nothing done when it is another already. The lock waits for claims of this worker that are under way, and
-- the second statement sees what they claimed: with one statement for both, its snapshot would be older.
create function disown_effects(p_worker text, p_generation integer, p_keep uuid[])
returns integer language plpgsql as $$
declare
    raised integer;
begin
    perform pg_advisory_xact_lock(hashtext('headrace claims'), hashtext(p_worker));
    update workers w set generation = w.generation + 1
    where w.id = p_worker and w.generation = p_generation
    returning w.generation into raised;
    if found then
        update effects e set worker = null where e.worker = p_worker and e.id <> all (p_keep);
    end if;
    return raised;
end $$;

-- Claim as before, under the generation that the worker believes in. Raises HR003 when that one is over. An
-- advisory lock, for a claim that finds nothing takes no transaction id, and a lease is renewed meanwhile.
create function claim_effects(
    p_worker text, p_lanes text[], p_consumers text[], p_limit integer, p_generation integer
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
    return query select * from claim_effects(p_worker, p_lanes, p_consumers, p_limit);
end $$;
