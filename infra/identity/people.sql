-- People, members, invitations and device logins: what `infra/identity/` writes and asks.
-- How this file is read: `infra/spine/postgres/queries.py`.

-- == People ===============================================================================================

-- part: person_columns
p.id, p.name, p.email, p.created_at, p.removed_at

-- name: insert_person
insert into people (id, name, email, created_by) values ($1, $2, $3, $4)
returning id, name, email, created_at, removed_at

-- name: person
select {person_columns} from people p where p.id = $1

-- name: people_with_ids
select {person_columns} from people p where p.id = any($1::text[])

-- name: person_with_email
select {person_columns} from people p where lower(p.email) = lower($1) and p.removed_at is null

-- name: people
select {person_columns} from people p where $1 or p.removed_at is null order by p.created_at, p.id limit $2 offset $3

-- name: count_people
select count(*) from people where $1 or removed_at is null

-- Who joins an organisation and who is removed from the installation wait for each other. Locks are taken in the order
-- person, organisation, and then the rest.

-- name: lock_person
select {person_columns} from people p where p.id = $1 for update

-- name: mark_removed
update people set removed_at = clock_timestamp() where id = $1 and removed_at is null

-- name: organisations_of_person
select organisation, role from members where person = $1 order by organisation


-- == Members ==============================================================================================

-- Changes of the members of an organisation wait for each other, so two owners cannot both leave as the last but one.

-- name: lock_organisation
select id from organisations where id = $1 for update

-- part: select_members
select {person_columns}, m.role, m.created_at as joined_at, m.from_groups from members m join people p on p.id = m.person

-- name: members
{select_members} where m.organisation = $1 order by m.created_at, p.id limit $2 offset $3

-- name: count_members
select count(*) from members m join people p on p.id = m.person where m.organisation = $1

-- name: members_named
{select_members} where m.organisation = $1 and (p.id = $2 or lower(p.email) = lower($2) or p.name = $2)
order by (p.id = $2) desc, (lower(p.email) = lower($2)) desc limit 5

-- name: other_owners
select count(*) from members where organisation = $1 and role = 'owner' and person <> $2

-- Whatever a member makes that ends with the membership is made under this lock, so that a removal at the same time finds
-- it, or it finds the removal.

-- name: keep_membership
select role from members where organisation = $1 and person = $2 for share

-- name: insert_member
insert into members (organisation, person, role, created_by) values ($1, $2, $3, $4) on conflict do nothing
returning person

-- name: set_role
update members set role = $3, changed_at = clock_timestamp() where organisation = $1 and person = $2

-- name: delete_member
delete from members where organisation = $1 and person = $2

-- With a member go the keys that are bound to the organisation, and what would make new ones.

-- name: revoke_keys_of_member
update api_keys set revoked_at = clock_timestamp()
where organisation = $1 and person = $2 and revoked_at is null

-- name: delete_device_logins_of_member
delete from device_logins where organisation = $1 and person = $2

-- name: delete_invitations_of_member
delete from invitations where organisation = $1 and inviter = $2


-- == Invitations ==========================================================================================

-- name: insert_invitation
with expired as (delete from invitations where id in (
  select id from invitations where expires_at < clock_timestamp() limit 1000 for update skip locked)),
held as (select count(*) as number from invitations where organisation = $3 and expires_at > clock_timestamp())
insert into invitations (id, sha256, organisation, role, email, created_by, inviter, expires_at)
select $1, $2, $3, $4, $5, $6, $7, clock_timestamp() + make_interval(secs => $8) from held where held.number < $9
returning id, organisation, role, email, created_at, created_by, expires_at

-- name: invitation
select i.id, i.organisation, i.role, i.email, i.created_at, i.created_by, i.expires_at, o.title
from invitations i join organisations o on o.id = i.organisation
where i.sha256 = $1 and i.expires_at > clock_timestamp()

-- name: take_invitation
delete from invitations where sha256 = $1 and expires_at > clock_timestamp()
returning id, organisation, role, email, created_at, created_by, expires_at

-- name: invitations
select id, organisation, role, email, created_at, created_by, expires_at from invitations
where organisation = $1 and expires_at > clock_timestamp() order by created_at desc, id

-- name: delete_invitation
delete from invitations where organisation = $1 and id = $2 returning id


-- == Device logins ========================================================================================

-- Each new one deletes a few that have expired, and the oldest that wait while there are $7 or more: strangers who begin
-- many then shorten the time that a code may take, and keep nobody out. What a person has decided stays.

-- name: insert_device_login
with expired as (delete from device_logins where device_sha256 in (
  select device_sha256 from device_logins where expires_at < clock_timestamp() limit 1000 for update skip locked)),
held as (select count(*) as number from device_logins where expires_at > clock_timestamp() and decided_at is null),
dropped as (delete from device_logins where device_sha256 in (
  select device_sha256 from device_logins where expires_at > clock_timestamp() and decided_at is null order by expires_at
  limit (select least(100, greatest(0, number + 1 - $7)) from held) for update skip locked))
insert into device_logins (device_sha256, user_sha256, device_name, address, interval_s, expires_at)
values ($1, $2, $3, $4, $5, clock_timestamp() + make_interval(secs => $6))

-- name: device_login_of_user_code
select device_name, address, created_at, expires_at from device_logins
where user_sha256 = $1 and expires_at > clock_timestamp() and decided_at is null

-- The key will have the scopes of the key that approves.

-- name: decide_device_login
update device_logins set decided_at = clock_timestamp(), approved = $2, person = $3, organisation = $4,
  workspace = $5, scopes = (select k.scopes from api_keys k where k.id = $6), approved_by = $6, key_expires_at = $7
where user_sha256 = $1 and expires_at > clock_timestamp() and decided_at is null
returning device_name

-- A question that comes too soon makes the interval longer, by the seconds of $2.

-- name: poll_device_login
with before as (select device_sha256, polled_at, interval_s from device_logins
  where device_sha256 = $1 and expires_at > clock_timestamp() for update),
judged as (select device_sha256, interval_s,
  coalesce(clock_timestamp() - polled_at < make_interval(secs => interval_s) * 0.8, false) as is_too_soon from before)
update device_logins d set polled_at = clock_timestamp(),
  interval_s = d.interval_s + case when j.is_too_soon then $2::integer else 0 end
from judged j where d.device_sha256 = j.device_sha256
returning d.approved, d.interval_s, j.is_too_soon, d.device_name, d.person

-- name: take_device_login
delete from device_logins where device_sha256 = $1 and approved and expires_at > clock_timestamp()
returning device_name, address, person, organisation, workspace, scopes, approved_by, key_expires_at

-- name: delete_device_login
delete from device_logins where device_sha256 = $1

-- An approval ends with the API key that gave it.

-- name: approval_stands
select exists (select from api_keys k join members m on m.organisation = k.organisation and m.person = k.person
  where k.id = $1 and k.revoked_at is null and (k.expires_at is null or k.expires_at > clock_timestamp())
    and k.person = $2 and m.organisation = $3)
