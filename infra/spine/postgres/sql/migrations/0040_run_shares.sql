-- Links that show one run to whoever has them. Only the SHA-256 of the key of a link is here.
create table run_shares (
    share      text primary key,
    sha256     bytea not null unique,
    run        text not null,
    created_by text not null,
    created_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null
);
create index run_shares_run on run_shares (run);

select grant_processes();
