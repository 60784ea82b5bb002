-- Which blobs belong to this database: one row, written by the first process that worked on it.
create table installation (
    alone boolean primary key default true check (alone),
    id    text not null,
    blobs text not null,
    place text not null,
    since timestamptz not null default clock_timestamp()
);
