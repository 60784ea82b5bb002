-- People join an organisation by an invitation, and sign programs in with a code that they approve in a browser. Of
-- invitations and codes the database holds only SHA-256. The name of an API key is unique among the keys of its
-- organisation, workspace and person, so that nobody learns the names of others.

create table device_logins (
    device_sha256  bytea primary key,
    user_sha256    bytea not null unique,
    device_name    text not null,
    address        text not null,
    created_at     timestamptz not null default clock_timestamp(),
    expires_at     timestamptz not null,
    polled_at      timestamptz,
    interval_s     integer not null,
    decided_at     timestamptz,
    approved       boolean,
    person         text,
    organisation   text,
    workspace      text,
    scopes         text[],
    approved_by    text,
    key_expires_at timestamptz
);
create index device_logins_by_expiry on device_logins (expires_at);

create table invitations (
    id           text primary key,
    sha256       bytea not null unique,
    organisation text not null,
    role         text not null check (role in ('owner', 'member', 'viewer')),
    email        text,
    created_at   timestamptz not null default clock_timestamp(),
    created_by   text not null,
    inviter      text,
    expires_at   timestamptz not null
);
create index invitations_by_organisation on invitations (organisation, created_at);

alter table members add column changed_at timestamptz not null default clock_timestamp();

drop index api_keys_name;
create unique index api_keys_name on api_keys
    (coalesce(organisation, ''), coalesce(workspace, ''), coalesce(person, ''), name) where revoked_at is null;

select grant_processes();
