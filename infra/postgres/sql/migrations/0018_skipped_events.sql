-- Events that a projection could not turn into rows. A row is written in the commit that moves the
-- projection's cursor past the event, and a rebuild of the projection deletes all of its rows.
create table skipped_events (
    projection text not null,
    event      text not null,
    run        text not null,
    event_type text not null,
    stream     text not null,
    version    integer not null,
    xid        bigint not null,
    position   bigint not null,
    error      text not null,
    at         timestamptz not null,
    primary key (projection, event)
);
select grant_processes();
