-- How far the relay has published the log to a broker, and to which: `ends` are the offsets that the
-- broker had acknowledged, by `topic/partition`. One row, moved by the session that holds the lock;
-- `seen_at` is when the broker was last seen to be well.
create table relay (
    name     text primary key,
    cluster  text not null,
    ends     json not null,
    xid      xid8 not null,
    position bigint not null,
    seen_at  timestamptz not null default clock_timestamp()
);

-- Per consumer group of the broker: how many records it has not acknowledged, as the relay saw it.
create table bus_lag (
    consumers text primary key,
    records   bigint not null,
    seen_at   timestamptz not null default clock_timestamp()
);

-- Records that a bus met and no consumer could use, by why: counted, for there may be many.
create table bus_skips (
    reason  text primary key,
    count   bigint not null,
    last_at timestamptz not null default clock_timestamp()
);
