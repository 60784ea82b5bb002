-- Versioned artifacts: what the registry lists, and how a version is withdrawn.

-- Published versions of capabilities, tasks and models. `precedence` sorts as the versions do.
create table published_artifacts (
    artifact     text primary key,
    organisation text not null,
    kind         text not null,
    name         text not null,
    semver       text not null,
    precedence   text collate "C" not null,
    is_prerelease boolean not null,
    sha256       text not null,
    file_size    bigint not null,
    num_files    integer not null,
    unpacked_bytes bigint not null,
    summary      text not null,
    publisher    text,
    created_at   timestamptz not null
);
create unique index published_artifacts_by_name
    on published_artifacts (organisation, kind, name, precedence desc);

-- Remove a version of an artifact: the notice is then the only event of its stream. Raises HR004 when another event
-- names its bytes.
create function remove_artifact(
    p_artifact text, p_uris text[],
    t_id uuid, t_type text, t_schema integer, t_data text, t_cause uuid
) returns table (r_position bigint, r_xid xid8, r_time timestamptz) language plpgsql
set enable_seqscan = off set enable_indexscan = off as $$
declare
    own text := 'artifact-' || p_artifact;
    last record;
    used text;
begin
    perform from streams s where s.stream = own for update;
    select e.xid, e.position, e.type into last from events e where e.stream = own
    order by e.version desc limit 1;
    if not found or last.type <> 'rl.artifact.published' then
        raise exception '%', own using errcode = 'HR001';
    end if;
    select e.stream into used from unnest(p_uris) as u (uri) join events e
        on e.data::text like '%"uri"%' and named_hashes(e.data) @> array[hashtextextended(u.uri, 0)]
    where e.stream <> own limit 1;
    if used is not null then
        raise exception 'USED %', used using errcode = 'HR004';
    end if;
    perform begin_removal(last.xid, last.position);
    delete from events e where e.stream = own;
    insert into discarded_blobs (uri) select unnest(p_uris)
        on conflict (uri) do update set at = clock_timestamp();
    return query select * from leave_notice(
        own, 1, p_artifact, t_id, t_type, t_schema, t_data, t_cause);
end $$;

do $$ begin
    execute format('alter function remove_artifact(text, text[], uuid, text, integer, text, uuid)'
                   ' security definer set search_path = %I, pg_temp', current_schema());
end $$;

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
                       'datasets', 'published_artifacts', 'workspaces', 'evaluations', 'dead_letters',
                       'deliveries', 'pushes', 'triggered_runs', 'deployments', 'hub_uploads')
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
