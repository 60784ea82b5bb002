-- Pushes that train: connections to forges with their secrets, and what the read model shows of
-- deliveries, pushes and triggers.

-- One row for each connected workspace. `secret` and `previous_secret` are those of the webhook, and
-- `credential` is a token, a key or a GitHub App. All three are sealed (infra/postgres/sealed.py). The
-- previous secret is valid until `previous_until`.
create table connections (
    workspace       text primary key,
    provider        text not null,
    url             text not null,
    hook            text,
    secret          bytea,
    previous_secret bytea,
    previous_until  timestamptz,
    credential      bytea,
    created_at      timestamptz not null default clock_timestamp(),
    updated_at      timestamptz not null default clock_timestamp()
);

-- What a forge delivered, or what made sync look, newest last.
create table deliveries (
    workspace text not null,
    event     text not null,
    kind      text not null,
    provider  text,
    delivery  text,
    ref       text,
    before    text,
    after     text,
    forced    boolean not null default false,
    pusher    text,
    at        timestamptz not null,
    primary key (workspace, event)
);
create index deliveries_by_time on deliveries (workspace, at desc);

-- Where the refs of a workspace's repository are, and every move of one. `reason` says why a push led to
-- no run, and `error` what is wrong with its commit.
create table pushes (
    workspace text not null,
    number    bigint not null,
    ref       text not null,
    before    text,
    after     text,
    baseline  boolean not null default false,
    reason    text,
    error     text,
    at        timestamptz not null,
    primary key (workspace, number)
);
create index pushes_by_commit on pushes (workspace, ref, after);

-- What a trigger made of a push: one row for each trigger that matched.
create table triggered_runs (
    workspace text not null,
    number    bigint not null,
    trigger   integer not null,
    config    text not null,
    run       text not null,
    run_name  text,
    outcome   text not null,
    detail    text,
    primary key (workspace, number, trigger)
);
create index triggered_runs_by_run on triggered_runs (run);

alter table workspaces
    add column provider text,
    add column refs_digest text,
    add column refs_error text,
    add column refs_at timestamptz,
    add column default_branch text,
    add column push_error text;
select grant_processes();
