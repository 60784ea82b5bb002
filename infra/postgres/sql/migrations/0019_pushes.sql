-- Pushes that train: connections to forges with their secrets, and what the read model shows of
-- deliveries, pushes and triggers.

-- One row for each connected workspace. `secret` and `previous_secret` are those of the webhook, and
-- `credential` is a token, a key or a GitHub App. All three are sealed (infra/postgres/sealed.py). The
-- previous secret is valid until `previous_until`.
create table connections (
    workspace       text primary key,
    provider        text not null,
    url             text not null,
    hook            text,
    secret          bytea,
    previous_secret bytea,
    previous_until  timestamptz,
    credential      bytea,
    created_at      timestamptz not null default clock_timestamp(),
    updated_at      timestamptz not null default clock_timestamp()
);

-- What a forge delivered, or what made sync look, newest last.
create table deliveries (
    workspace text not null,
    event     text not null,
    kind      text not null,
    provider  text,
    delivery  text,
    ref       text,
    before    text,
    after     text,
    forced    boolean not null default false,
    pusher    text,
    at        timestamptz not null,
    primary key (workspace, event)
);
create index deliveries_by_time on deliveries (workspace, at desc);

-- Every move of a ref of a workspace's repository. `push` is `<workspace>.<number>`. `reason` says why it
-- led to no run, and `error` what is wrong with its commit.
create table pushes (
    push      text primary key,
    workspace text not null,
    number    bigint not null,
    ref       text not null,
    before    text,
    after     text,
    baseline  boolean not null default false,
    examined  boolean not null default false,
    reason    text,
    error     text,
    at        timestamptz not null
);
create index pushes_by_number on pushes (workspace, number desc);
create index pushes_by_commit on pushes (workspace, ref, after);

-- What became of each trigger that a push matched: one row for each run that was, or would have been.
-- `commit_state` and `commit_text` are the status that its commit shows.
create table triggered_runs (
    run       text primary key,
    push      text not null,
    workspace text not null,
    trigger   integer not null,
    config    text not null,
    run_name  text,
    outcome   text not null,
    detail    text,
    commit_state text,
    commit_text  text
);
create index triggered_runs_by_push on triggered_runs (push);

alter table workspaces
    add column provider text,
    add column refs_digest text,
    add column refs_error text,
    add column refs_at timestamptz,
    add column default_branch text,
    add column push_error text;

-- The tables of the read model that are new may be emptied before the log is projected again.
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
                       'deliveries', 'pushes', 'triggered_runs')
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
