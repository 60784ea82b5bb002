-- Imports of evaluations that ran elsewhere, while their files arrive: which files there are, and the upload of each.
-- `number` counts the imports of an evaluation, and `claimed_until` lets one of them be finalized at a time.

create table evaluation_imports (
    id            text primary key,
    evaluation    text not null,
    number        integer not null,
    workspace     text not null,
    content       text not null,
    claimed_until timestamptz,
    created_at    timestamptz not null default clock_timestamp()
);
create index evaluation_imports_by_evaluation on evaluation_imports (evaluation);

create table evaluation_import_files (
    import text not null references evaluation_imports on delete cascade,
    path   text not null,
    upload text not null,
    primary key (import, path)
);

alter table evaluation_imports enable row level security;
create policy visible_workspaces on evaluation_imports using (
    (select shown_workspaces()) is null or workspace = any ((select shown_workspaces())::text[]));

select grant_processes();
