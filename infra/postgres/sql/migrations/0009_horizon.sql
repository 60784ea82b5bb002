-- What holds the horizon of the log back are transactions that write, and nothing else: one that only
-- reads has a snapshot, but no id that an event's could be compared with. A prepared transaction belongs
-- to no session.
create or replace function horizon_age_s() returns double precision
language sql security definer set search_path = pg_catalog as $$
    select extract(epoch from clock_timestamp() - min(since))::float8
    from (select xact_start as since from pg_stat_activity where backend_xid is not null
          union all
          select prepared from pg_prepared_xacts) as writing
$$;
