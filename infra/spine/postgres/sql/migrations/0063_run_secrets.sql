-- Secrets that a submission gives for its run or evaluation alone. They go when it ends.

create table run_secrets (
    owner      text not null,
    name       text not null check (length(name) <= 64),
    sealed     bytea not null,
    key        text not null,
    created_at timestamptz not null default clock_timestamp(),
    primary key (owner, name)
);

select grant_processes();
