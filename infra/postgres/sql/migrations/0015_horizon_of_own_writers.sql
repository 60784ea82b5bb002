-- The log's horizon, without the writers of other databases. A snapshot's own xmin is that of the whole
-- server: a transaction that is open in another database would hold our log back for as long as it likes.
--
-- $1 is the snapshot of the statement that reads the log. A transaction that it saw in progress is left
-- out only where it is known to belong to another database; one that ended meanwhile, or is not shown,
-- counts. What is asked of the sessions is asked after the snapshot was taken: a session that is shown in
-- the place of one that has just ended has a transaction id that the snapshot does not hold. That is why
-- what an earlier statement of this transaction was told about sessions is dropped first.
create function own_horizon(pg_snapshot) returns xid8
language plpgsql stable security definer set search_path = pg_catalog as $$
declare
    here oid := (select oid from pg_database where datname = current_database());
    oldest xid8;
begin
    perform pg_stat_clear_snapshot();
    with foreign_writers as materialized (
        select backend_xid as writer from pg_stat_get_activity(null)
        where backend_xid is not null and datid <> here
        union all
        select transaction from pg_prepared_xact() where dbid <> here)
    select running into oldest from pg_snapshot_xip($1) running
    where running::xid not in (select writer from foreign_writers)
    order by running limit 1;
    return coalesce(oldest, pg_snapshot_xmax($1));
end $$;

-- Who holds the horizon back, oldest first: transactions of this database that write, and prepared ones.
-- `pid` is null for a prepared transaction, whose `name` is the one to commit or roll it back by.
create function horizon_holders()
returns table (pid integer, name text, username text, application text, address text, since timestamptz)
language sql stable security definer set search_path = pg_catalog as $$
    select a.pid, null::text, a.usename::text, nullif(a.application_name, ''), host(a.client_addr),
           a.xact_start
    from pg_stat_activity a where a.backend_xid is not null and a.datname = current_database()
    union all
    select null, p.gid, p.owner::text, null, null, p.prepared
    from pg_prepared_xacts p where p.database = current_database()
    order by 6
$$;

create or replace function horizon_age_s() returns double precision
language sql security definer set search_path = pg_catalog as $$
    select extract(epoch from clock_timestamp() - min(since))::float8
    from (select xact_start as since from pg_stat_activity
          where backend_xid is not null and datname = current_database()
          union all
          select prepared from pg_prepared_xacts where database = current_database()) as writing
$$;
