-- API keys and the audit list: what `infra/identity/` writes and asks.
-- How this file is read: `infra/spine/postgres/queries.py`.

-- == API keys =============================================================================================

-- The role of a key's person, who is a member of the key's organisation or has no role.

-- part: api_key_columns
id, name, owner, prefix, sha256, scopes, workspace, expires_at, created_at, created_by,
  last_used_at, revoked_at, old_sha256, old_until, rotated_at, organisation, person,
  (select m.role from members m where m.organisation = api_keys.organisation and m.person = api_keys.person) as role

-- part: select_api_keys
select {api_key_columns} from api_keys

-- Nothing is inserted beyond $10 API keys that are not revoked, or $13 of one organisation. A key of a workspace belongs
-- to its organisation.

-- name: insert_api_key
with home as (select coalesce($11, (select h.organisation from workspace_homes h where h.workspace = $7),
                              case when $7::text is not null then 'main' end) as organisation)
insert into api_keys (id, name, owner, prefix, sha256, scopes, workspace, expires_at, created_by, organisation,
                      person)
select $1, $2, $3, $4, $5, $6, $7, $8, $9, home.organisation, $12 from home
where (select count(*) from api_keys where revoked_at is null) < $10
  and (select count(*) from api_keys k where k.organisation = home.organisation and k.revoked_at is null) < $13
returning {api_key_columns}

-- name: page_of_api_keys
{select_api_keys}
where ($1::text is null or workspace = $1) and ($2::text is null or organisation = $2) and ($3 or revoked_at is null)
order by created_at desc, id limit $4 offset $5

-- name: count_api_keys
select count(*) from api_keys
where ($1::text is null or workspace = $1) and ($2::text is null or organisation = $2) and ($3 or revoked_at is null)

-- name: api_keys_named
{select_api_keys} where (id = $1 or prefix = $1 or name = $1) and ($2::text is null or workspace = $2)
and ($3::text is null or organisation = $3)
order by (id = $1 or prefix = $1) desc, revoked_at is not null, created_at desc limit 5

-- name: revoke_api_key
update api_keys set revoked_at = clock_timestamp() where id = $1 and revoked_at is null

-- The secret before this one ends now, when the one before it is still valid: there is one old secret.

-- name: rotate_api_key
update api_keys set sha256 = $2, old_sha256 = sha256, rotated_at = clock_timestamp(), expires_at = $4,
  old_until = least(clock_timestamp() + make_interval(secs => $3), expires_at)
where id = $1 and revoked_at is null
returning {api_key_columns}

-- Changes whenever an API key is created, rotated or revoked: rows are never deleted, and a revocation is final. And
-- whenever a member comes, goes or gets another role: with the same number of members the sum then only grows, also when
-- a change is committed after a later one.

-- name: api_keys_mark
select count(*) || '/' || count(revoked_at) || '/' || coalesce(max(created_at)::text, '') || '/'
  || coalesce(max(rotated_at)::text, '') || '/'
  || (select count(*) || '/' || coalesce(sum(extract(epoch from changed_at)), 0) from members) from api_keys

-- name: known_api_keys
{select_api_keys} order by revoked_at desc nulls first limit $1

-- name: mark_used
update api_keys t set last_used_at = greatest(t.last_used_at, u.at)
from unnest($1::text[], $2::timestamptz[]) as u (id, at) where t.id = u.id


-- == Sign-ins of browsers =================================================================================

-- Each sign-in deletes a few that have expired, so that the tables stay small and no sign-in waits long.

-- name: insert_code
with expired as (delete from sign_in_codes where sha256 in (
  select sha256 from sign_in_codes where expires_at < clock_timestamp() limit 1000 for update skip locked))
insert into sign_in_codes (sha256, api_key, api_key_sha256, expires_at)
values ($1, $2, $3, clock_timestamp() + make_interval(secs => $4))

-- name: code
select api_key, api_key_sha256 from sign_in_codes where sha256 = $1 and expires_at > clock_timestamp()

-- name: redeem_code
delete from sign_in_codes where sha256 = $1 and expires_at > clock_timestamp()
returning api_key, api_key_sha256

-- name: insert_session
with expired as (delete from browser_sessions where sha256 in (
  select sha256 from browser_sessions where expires_at < clock_timestamp() limit 1000 for update skip locked))
insert into browser_sessions (sha256, api_key, api_key_sha256, expires_at)
values ($1, $2, $3, clock_timestamp() + make_interval(secs => $4))

-- name: session
select api_key, api_key_sha256 from browser_sessions where sha256 = $1 and expires_at > clock_timestamp()

-- name: delete_session
delete from browser_sessions where sha256 = $1

-- Sign-ins of the API keys of an owner ($1, null for all), or of one key alone ($2). The root key, whose id
-- is $3, is a setting and has the owner $4.

-- part: sign_ins_of
(api_key = $2 or $2::text is null) and ($1::text is null or api_key = $3 and $1 = $4
  or api_key in (select id from api_keys where owner = $1))

-- Whether a session `s` still opens pages: it has not expired, and neither has the secret that signed in.

-- part: opens_pages
s.expires_at > clock_timestamp() and (s.api_key = $3 or exists (
  select from api_keys t where t.id = s.api_key and t.revoked_at is null
    and (t.sha256 = s.api_key_sha256 and (t.expires_at is null or t.expires_at > clock_timestamp())
      or t.old_sha256 = s.api_key_sha256 and t.old_until > clock_timestamp())))

-- name: sessions
select sha256, api_key, created_at, expires_at,
  (select t.name from api_keys t where t.id = s.api_key) as api_key_name,
  case when api_key = $3 then $4 else (select t.owner from api_keys t where t.id = s.api_key) end as owner
from browser_sessions s
where {sign_ins_of} and {opens_pages}
order by created_at desc, sha256 limit $5

-- name: delete_sessions
with codes as (delete from sign_in_codes where {sign_ins_of}),
ended as (delete from browser_sessions s where {sign_ins_of} returning {opens_pages} as was_open)
select count(*) from ended where was_open


-- == The audit list =======================================================================================

-- The lock on the heads gives the entries of all processes one order.

-- name: lock_heads
select chain, sha256 from audit_heads order by chain for update

-- name: set_heads
update audit_heads h set sha256 = n.sha256 from unnest($1::text[], $2::bytea[]) as n (chain, sha256)
where h.chain = n.chain

-- name: insert_audit
insert into audit (at, last_at, count, allowed, api_key, owner, workspace, address, method, route, subject,
                   status, organisation, previous_sha256, sha256)
select at, last_at, count, allowed, api_key, owner, workspace, address, method, route, subject, status, organisation,
  previous_sha256, sha256
from unnest($1::timestamptz[], $2::timestamptz[], $3::integer[], $4::boolean[], $5::text[],
            $6::text[], $7::text[], $8::text[], $9::text[], $10::text[], $11::text[], $12::smallint[],
            $13::text[], $14::bytea[], $15::bytea[]) with ordinality
  as e (at, last_at, count, allowed, api_key, owner, workspace, address, method, route, subject, status, organisation,
        previous_sha256, sha256, place)
order by place

-- name: audit_after
select id, at, last_at, count, allowed, api_key, owner, workspace, organisation, address, method, route, subject, status,
  encode(previous_sha256, 'hex') as previous_sha256, encode(sha256, 'hex') as sha256
from audit where id > $1 and id <= $2 order by id limit $3

-- name: audit_heads
select chain, encode(sha256, 'hex') as sha256, (select coalesce(max(id), 0) from audit) as last_id from audit_heads

-- part: audit_to_show
($1::timestamptz is null or last_at >= $1) and ($2::text is null or api_key = $2 or owner = $2
  or api_key in (select id from api_keys where name = $2))
and ($3::text is null or workspace = $3) and ($4::text is null or organisation = $4)

-- name: page_of_audit
select at, last_at, count, allowed, api_key, owner, workspace, organisation, address, method, route, subject, status,
  (select t.name from api_keys t where t.id = a.api_key) as api_key_name
from audit a where {audit_to_show} order by at desc, id desc limit $5 offset $6

-- name: count_audit
select count(*) from audit where {audit_to_show}

-- The oldest rows of each kind: those that are too old, up to the first that is not, and those beyond the newest ones. So
-- what stays of a chain has no gap. The newest row of each kind stays whatever its age, so that a chain whose rows are
-- all missing was tampered with.

-- part: changes
allowed and method not in ('GET', 'HEAD')

-- name: trim_audit
delete from audit where
({changes}) and id < (select max(id) from audit where {changes})
  and (id < coalesce((select min(id) from audit where {changes} and last_at >= $1), 9223372036854775807)
    or id <= (select id from audit where {changes} order by id desc offset $2 limit 1))
or not ({changes}) and id < (select max(id) from audit where not ({changes}))
  and (id < coalesce((select min(id) from audit where not ({changes}) and last_at >= $1), 9223372036854775807)
    or id <= (select id from audit where not ({changes}) order by id desc offset $3 limit 1))

-- Links that show one run. Each new one deletes a few that have expired.

-- name: insert_share
with expired as (delete from run_shares where share in (
  select share from run_shares where expires_at < clock_timestamp() limit 1000 for update skip locked)),
held as (select count(*) as number from run_shares where run = $3 and expires_at > clock_timestamp())
insert into run_shares (share, sha256, run, created_by, expires_at)
select $1, $2, $3, $4, clock_timestamp() + make_interval(secs => $5) from held where held.number < $6
returning expires_at

-- name: share
select run from run_shares where sha256 = $1 and expires_at > clock_timestamp()

-- name: shares_of_run
select share, created_by, created_at, expires_at from run_shares
where run = $1 and expires_at > clock_timestamp() order by created_at desc, share

-- name: delete_share
delete from run_shares where run = $1 and share = $2 returning share

-- == Signed URLs ==========================================================================================

-- name: url_key
select sealed from url_keys

-- A key is replaced only if it is still the one that did not open.

-- name: put_url_key
insert into url_keys as k (id, sealed) values (1, $1) on conflict (id) do update
set sealed = excluded.sealed, created_at = clock_timestamp() where k.sealed = $2::bytea
