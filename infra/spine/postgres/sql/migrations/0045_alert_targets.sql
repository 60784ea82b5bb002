-- Where the members of a workspace let alerts go.
create table alert_targets (
    id         text primary key,
    workspace  text not null,
    medium     text not null check (medium in ('webhook', 'mail')),
    shown      text not null,
    address    bytea not null,
    secret     bytea,
    kinds      text[] not null,
    created_by text not null,
    created_at timestamptz not null default clock_timestamp(),
    error      text
);
create index alert_targets_of_workspace on alert_targets (workspace, created_at);

select grant_processes();
