-- Sign-in with OpenID Connect: what `infra/identity/oidc/` writes and asks.
-- How this file is read: `infra/spine/postgres/queries.py`.

-- == Sign-ins that have begun =============================================================================

-- Each new one deletes a few that have expired, and the oldest while there are $5 or more: strangers who begin many
-- then shorten the time that a sign-in may take, and keep nobody out.

-- name: insert_attempt
with expired as (delete from sign_in_attempts where state_sha256 in (
  select state_sha256 from sign_in_attempts where expires_at < clock_timestamp() limit 1000 for update skip locked)),
held as (select count(*) as number from sign_in_attempts where expires_at > clock_timestamp()),
dropped as (delete from sign_in_attempts where state_sha256 in (
  select state_sha256 from sign_in_attempts where expires_at > clock_timestamp() order by expires_at
  limit (select least(100, greatest(0, number + 1 - $5)) from held) for update skip locked))
insert into sign_in_attempts (state_sha256, browser_sha256, next, expires_at)
values ($1, $2, $3, clock_timestamp() + make_interval(secs => $4))

-- name: take_attempt
delete from sign_in_attempts
where state_sha256 = $1 and browser_sha256 = $2 and expires_at > clock_timestamp()
returning next


-- == People and their accounts ============================================================================

-- name: person_of_account
select person from person_accounts where issuer = $1 and subject = $2

-- name: subject_of_person
select subject from person_accounts where person = $1 and issuer = $2

-- An account whose person was removed may become another person's.

-- name: put_account
insert into person_accounts as a (issuer, subject, person) values ($1, $2, $3)
on conflict (issuer, subject) do update set person = excluded.person, signed_in_at = clock_timestamp()
where a.person = excluded.person
   or exists (select from people p where p.id = a.person and p.removed_at is not null)
returning person

-- An address that an invitation took was only claimed. Its holder comes with the first sign-in that the provider vouches
-- for, and what was made before ends.

-- name: end_access_of_before
with keys as (update api_keys set revoked_at = clock_timestamp() where person = $1 and revoked_at is null),
logins as (delete from device_logins where person = $1)
delete from invitations where inviter = $1

-- name: organisations_named
select id, name from organisations where name = any($1::text[]) order by id

-- name: memberships
select m.organisation, o.name, o.title, m.role, m.from_groups from members m join organisations o on o.id = m.organisation
where m.person = $1 order by o.name

-- name: insert_member_from_groups
insert into members (organisation, person, role, created_by, from_groups) values ($1, $2, $3, $4, true)
on conflict do nothing


-- == API keys of sign-ins =================================================================================

-- Keys of a person that expired, and that a sign-in made or approved: $2 is the name by which they were made.

-- name: revoke_expired
update api_keys k set revoked_at = clock_timestamp()
where k.person = $1 and k.revoked_at is null and k.expires_at < clock_timestamp()
  and (k.created_by = $1 || '/' || $2 or exists (
    select from api_keys s where k.created_by = $1 || '/' || s.id and s.created_by = $1 || '/' || $2))

-- name: revoke_sign_in
update api_keys set revoked_at = clock_timestamp()
where id = $1 and created_by = person || '/' || $2 and revoked_at is null
returning id

-- name: sign_in_key
select expires_at from api_keys
where id = $1 and person = $2 and created_by = $2 || '/' || $3 and revoked_at is null and expires_at > clock_timestamp()
