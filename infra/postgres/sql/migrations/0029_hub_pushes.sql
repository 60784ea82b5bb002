-- Pushes of checkpoints to a model hub: what was asked for, and what became of it.
create table hub_pushes (
    push         text primary key,
    run          text not null,
    step         integer not null,
    repository   text not null,
    form         text not null,
    visibility   text not null,
    status       text not null default 'requested',
    url          text,
    revision     text,
    error        text,
    requested_by text,
    created_at   timestamptz not null,
    updated_at   timestamptz
);
create index hub_pushes_by_run on hub_pushes (run, step, created_at);

create or replace function grant_processes() returns void language plpgsql as $$
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
            -- What follows from the log alone is emptied as a whole before it is projected again.
            when t in ('runs', 'metric_points', 'checkpoints', 'graded_groups', 'log_lines',
                       'datasets', 'workspaces', 'evaluations', 'dead_letters',
                       'deliveries', 'pushes', 'triggered_runs', 'deployments', 'hub_pushes')
                then 'select, insert, update, delete, truncate'
            else 'select, insert, update, delete'
        end;
        execute format('revoke all on %I from headrace_worker', t);
        execute format('grant %s on %I to headrace_worker', rights, t);
    end loop;
    execute format('alter default privileges in schema %I grant select, insert, update, delete'
                   ' on tables to headrace_worker', current_schema());
end $$;
select grant_processes();
