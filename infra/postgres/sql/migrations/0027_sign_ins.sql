-- Sign-ins of browsers. The database holds only the SHA-256 of a session's cookie and of a one-time code.
-- `token_sha256` is that of the token that signed in, so a session ends with its token.
create table browser_sessions (
    sha256       bytea primary key,
    token        text not null,
    token_sha256 bytea not null,
    created_at   timestamptz not null default clock_timestamp(),
    expires_at   timestamptz not null
);

create table sign_in_codes (
    sha256       bytea primary key,
    token        text not null,
    token_sha256 bytea not null,
    expires_at   timestamptz not null
);
