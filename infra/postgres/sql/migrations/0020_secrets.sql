-- Secrets of workspaces and persons. `sealed` is an envelope (infra/postgres/keys/sealed.py), and `key` is the id of the
-- key that wraps its data key. `owner` is the id of a workspace, or the owner of a token.
create table secrets (
    id         uuid primary key default gen_random_uuid(),
    scope      text not null check (scope in ('workspace', 'personal')),
    owner      text not null,
    name       text not null check (length(name) <= 64),
    sealed     bytea not null,
    key        text not null,
    created_at timestamptz not null default clock_timestamp(),
    created_by text not null,
    updated_at timestamptz not null default clock_timestamp(),
    updated_by text not null,
    used_at    timestamptz,
    unique (scope, owner, name)
);
