-- The key of a worker's internal endpoint is no longer in the database. For each chat with a checkpoint the API
-- makes a grant, which is usable once, by one worker, for a short time. Only its SHA-256 is stored. Keys that
-- workers of an earlier version recorded disappear with these workers.
create table chat_grants (
    sha256     bytea primary key,
    worker     text not null,
    expires_at timestamptz not null
);

alter table worker_doors alter column key set default '';
