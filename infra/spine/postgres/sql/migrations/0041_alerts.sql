-- Alerts about runs, once for each kind and channel, until they are delivered.
create table alerts (
    run        text not null,
    kind       text not null,
    channel    text not null,
    content    text not null,
    attempts   integer not null default 0,
    due_at     timestamptz not null default clock_timestamp(),
    sent_at    timestamptz,
    error      text,
    created_at timestamptz not null default clock_timestamp(),
    primary key (run, kind, channel)
);
create index alerts_due on alerts (due_at) where sent_at is null;

select grant_processes();
