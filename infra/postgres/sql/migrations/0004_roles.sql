-- What a process may do: everything it needs, and never drop a table or rewrite what is recorded.

-- Make the role of processes and give it its rights, here and (again) in a cluster that a dump was
-- restored into. The role is shared by all databases of a server, so another one may have made it.
create function grant_processes() returns void language plpgsql as $$
declare
    t name;
    rights text;
begin
    if not exists (select from pg_roles where rolname = 'headrace_worker') then
        begin
            create role headrace_worker nologin;
        exception
            when duplicate_object or unique_violation then null;
            when insufficient_privilege then
                raise exception '% may not create roles: let an administrator run'
                    ' "create role headrace_worker nologin; grant headrace_worker to %"',
                    current_user, current_user;
        end;
    end if;
    if not (select rolsuper from pg_roles where rolname = current_user)
       and not pg_has_role(current_user, 'headrace_worker', 'usage') then
        execute format('grant headrace_worker to %I', current_user);
    end if;
    execute format('grant usage on schema %I to headrace_worker', current_schema());
    for t in select tablename from pg_tables where schemaname = current_schema() loop
        rights := case
            when t = 'events' then 'select, insert'
            when t = 'artifacts' then 'select, insert, delete'
            when t in ('migrations', 'cluster') then 'select'
            -- What follows from the log alone is forgotten as a whole before it is projected anew.
            when t in ('runs', 'metric_points', 'checkpoints', 'graded_groups', 'log_lines',
                       'datasets', 'workspaces', 'evaluations', 'dead_letters')
                then 'select, insert, update, delete, truncate'
            else 'select, insert, update, delete'
        end;
        execute format('revoke all on %I from headrace_worker', t);
        execute format('grant %s on %I to headrace_worker', rights, t);
    end loop;
    execute format('alter default privileges in schema %I grant select, insert, update, delete'
                   ' on tables to headrace_worker', current_schema());
end $$;
revoke execute on function grant_processes() from public;
select grant_processes();

-- Whoever is connected: an event is a fact.
create function refuse_rewriting() returns trigger language plpgsql as $$
begin
    raise exception 'events are facts: % is refused', tg_op using errcode = 'HR003';
end $$;
create trigger events_are_facts before update or delete or truncate on events
    for each statement execute function refuse_rewriting();

-- Statistics of other roles' sessions are hidden from this one; the horizon depends on all of them.
create function horizon_age_s() returns double precision
language sql security definer set search_path = pg_catalog as $$
    select extract(epoch from clock_timestamp() - min(xact_start))::float8
    from pg_stat_activity where backend_xid is not null or backend_xmin is not null
$$;
