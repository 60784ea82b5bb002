-- The secret that a rotation replaced, until when it is still valid, and when the token was rotated last.
alter table api_tokens add column old_sha256 bytea;
alter table api_tokens add column old_until timestamptz;
alter table api_tokens add column rotated_at timestamptz;
