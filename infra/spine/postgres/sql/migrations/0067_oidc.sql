-- Sign-in with OpenID Connect: which account of a provider is which person, and the sign-ins that have begun. A
-- membership that the groups of the provider gave follows them, and others stay as they are.

alter table members add column from_groups boolean not null default false;

create table person_accounts (
    issuer       text not null,
    subject      text not null,
    person       text not null references people,
    created_at   timestamptz not null default clock_timestamp(),
    signed_in_at timestamptz not null default clock_timestamp(),
    primary key (issuer, subject)
);
create unique index person_accounts_by_person on person_accounts (person, issuer);

create table sign_in_attempts (
    state_sha256   bytea primary key,
    browser_sha256 bytea not null,
    next           text not null,
    expires_at     timestamptz not null
);
create index sign_in_attempts_by_expiry on sign_in_attempts (expires_at);

select grant_processes();
