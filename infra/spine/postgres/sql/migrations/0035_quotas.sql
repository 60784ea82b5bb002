-- What an administrator lets a workspace use; null is without a limit. A quota that has no row has the limit of the
-- operator's settings.
create table workspace_quotas (
    workspace text not null,
    name      text not null,
    most      bigint,
    primary key (workspace, name)
);

-- Runs and evaluations that were let in, with the workspace and the API key for which they count.
create table admitted_runs (
    run         text primary key,
    stream      text not null,
    workspace   text,
    key         text,
    admitted_at timestamptz not null default clock_timestamp()
);
create index admitted_runs_by_workspace on admitted_runs (workspace, admitted_at);
create index admitted_runs_by_key on admitted_runs (key, admitted_at);

-- What a workspace or an API key (`holder`) used of a quota since the beginning of its minute or day.
create table quota_use (
    holder text not null,
    name   text not null,
    since  timestamptz not null,
    used   bigint not null,
    primary key (holder, name)
);

select grant_processes();
