-- Which blobs belong to this database: one row, written by the first process that worked on it.
create table installation (
    alone boolean primary key default true check (alone),
    id    text not null,
    blobs text not null,
    place text not null,
    since timestamptz not null default clock_timestamp()
);

-- Which cluster the transaction ids in this database are of. In another one (a dump was restored) they
-- mean nothing, and would hide what is appended next: infra/repair.py puts that right.
create table cluster (
    alone             boolean primary key default true check (alone),
    system_identifier bigint not null,
    since             timestamptz not null default clock_timestamp()
);
select grant_processes();
