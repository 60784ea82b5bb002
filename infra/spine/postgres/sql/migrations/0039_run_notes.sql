-- The tags and the note that people gave to a run. They do not follow from the log.
create table run_notes (
    run        text primary key,
    tags       text[] not null default '{}',
    note       text not null default '',
    changed_by text,
    changed_at timestamptz not null default clock_timestamp()
);
create index run_notes_tags on run_notes using gin (tags);

select grant_processes();
