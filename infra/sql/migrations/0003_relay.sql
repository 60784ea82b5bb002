-- How far the relay has published the log to a broker, and to which: `ends` are the offsets that the
-- broker had acknowledged, by `topic/partition`. One row, moved by the session that holds the lock.
create table relay (
    name     text primary key,
    cluster  text not null,
    ends     json not null,
    xid      xid8 not null,
    position bigint not null
);

-- Records that a bus met and no consumer could use, by why: counted, for there may be many.
create table bus_skips (
    reason  text primary key,
    count   bigint not null,
    last_at timestamptz not null default clock_timestamp()
);
