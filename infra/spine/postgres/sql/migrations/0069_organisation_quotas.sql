-- Quotas of organisations, which the operator sets, and of workspaces, which an owner of the organisation sets within
-- what the operator allows. What was let in and is not stored or deployed yet counts from `admitted_amounts`.

create table organisation_quotas (
    organisation text not null,
    name         text not null,
    most         bigint,
    primary key (organisation, name)
);

create table owner_quotas (
    workspace text not null,
    name      text not null,
    most      bigint not null,
    primary key (workspace, name)
);

alter table admitted_runs add column organisation text;
update admitted_runs a set organisation = coalesce(
    (select h.organisation from workspace_homes h where h.workspace = a.workspace),
    (select k.organisation from api_keys k where k.id = a.key),
    case when a.workspace is not null then 'main' end);
create index admitted_runs_by_organisation on admitted_runs (organisation, admitted_at);

create table admitted_amounts (
    kind         text not null check (kind in ('bytes', 'deployment')),
    id           text not null,
    organisation text not null,
    workspace    text,
    amount       bigint not null,
    admitted_at  timestamptz not null default clock_timestamp(),
    primary key (kind, id)
);

select grant_processes();
