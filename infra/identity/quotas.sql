-- Quotas: what `infra/identity/quotas.py` and `infra/identity/quota_limits.py` write and ask. How this file is read:
-- `infra/spine/postgres/queries.py`.

-- == Limits ===============================================================================================

-- name: limits_of
select name, most, false as is_owners from workspace_quotas where workspace = $1
union all select name, most, true from owner_quotas where workspace = $1
union all select name, most, false from organisation_quotas where organisation = $2

-- name: request_limits
select 'workspace' as kind, workspace as id, most, false as is_owners from workspace_quotas
where name = 'requests_per_minute'
union all select 'workspace', workspace, most, true from owner_quotas where name = 'requests_per_minute'
union all select 'organisation', organisation, most, false from organisation_quotas
where name = 'requests_per_minute'

-- name: set_limit_of_workspace
insert into workspace_quotas (workspace, name, most) values ($1, $2, $3)
on conflict (workspace, name) do update set most = excluded.most

-- name: unset_limit_of_workspace
delete from workspace_quotas where workspace = $1 and name = $2

-- name: set_limit_of_organisation
insert into organisation_quotas (organisation, name, most) values ($1, $2, $3)
on conflict (organisation, name) do update set most = excluded.most

-- name: unset_limit_of_organisation
delete from organisation_quotas where organisation = $1 and name = $2

-- name: set_owners_limit
insert into owner_quotas (workspace, name, most) values ($1, $2, $3)
on conflict (workspace, name) do update set most = excluded.most

-- name: unset_owners_limit
delete from owner_quotas where workspace = $1 and name = $2

-- A workspace without a home belongs to the organisation `main`.

-- name: home
select coalesce((select organisation from workspace_homes where workspace = $1), 'main')

-- name: organisation_name
select name from organisations where id = $1


-- == Runs =================================================================================================

-- Two control processes that admit something for one holder take turns until their transactions end.

-- name: lock_holder
select pg_advisory_xact_lock(hashtextextended($1, 35))

-- name: is_admitted
select exists (select from admitted_runs where run = $1)

-- part: runs_of_holder
(a.workspace = $1 or a.key = $2 or a.organisation = $3)

-- part: today
date_trunc('day', clock_timestamp(), 'UTC')

-- Whether a run has ended: the gate of its events is closed, or they were removed.

-- part: has_ended
(exists (select from run_gates g where g.run_id = a.run and g.state = 'closed')
  or exists (select from removals r where r.owner = a.run))

-- name: count_runs
select count(*) filter (where a.admitted_at >= {today}) as runs_per_day,
  count(*) filter (where not {has_ended}) as runs_at_once
from admitted_runs a where {runs_of_holder}

-- Those that ended before today, and those that a crash kept from being appended.

-- name: forget_runs
delete from admitted_runs a where {runs_of_holder} and (
  a.admitted_at < {today} and {has_ended}
  or a.admitted_at < clock_timestamp() - interval '10 minutes' and not {has_ended} and not exists (
    select from streams s where s.stream = a.stream and s.version > 0))

-- name: admit_run
insert into admitted_runs (run, stream, workspace, key, organisation) values ($1, $2, $3, $4, $5)
on conflict do nothing

-- name: withdraw_run
delete from admitted_runs where run = $1

-- What the workers hold of the runs of a workspace: the places that a claim compares with the quota.

-- name: count_samples
select coalesce(sum(e.size), 0) from effects e join run_gates g on g.run_id = e.run_id
where e.lane = 'generate' and e.worker is not null and g.workspace = $1


-- == What is there ========================================================================================

-- Each counts for a workspace ($1) or an organisation ($2).

-- Files of datasets as they were sent, those that a check has just accepted, and those that are being sent. A dataset
-- that was accepted has no row until the log is projected.

-- part: of_holder
(x.workspace = $1 or coalesce(x.organisation, 'main') = $2)

-- name: count_bytes
select (select coalesce(sum(x.file_size), 0) from datasets x where {of_holder})
  + (select coalesce(sum(x.file_size), 0) from published_artifacts x where x.organisation = $2)
  + (select coalesce(sum(x.file_size), 0) from dataset_uploads x where {of_holder} and x.status = 'uploaded'
     and not exists (select from datasets d where d.dataset = x.dataset))
  + (select coalesce(sum(x.size), 0) from uploads x where {of_holder} and x.status <> 'closed'
     and not exists (select from dataset_uploads s where s.id = x.id and s.status = 'uploaded'))
  + (select coalesce(sum(x.amount), 0) from admitted_amounts x where {of_holder} and x.kind = 'bytes'
     and not exists (select from uploads u where u.id = x.id))

-- A deployment that was let in counts until the log is projected as far as its request. $3 is the one that asks: it does
-- not count twice.

-- name: count_deployments
select count(*) from (
  select coalesce(x.workspace, '') || '/' || x.deployment as id from (
    select d.workspace, d.deployment, (select h.organisation from workspace_homes h where h.workspace = d.workspace)
      as organisation
    from deployments d where d.status = 'active' or d.pending <> '') x where {of_holder}
  union
  select x.id from admitted_amounts x where {of_holder} and x.kind = 'deployment'
    and not exists (select from deployments d where coalesce(d.workspace, '') || '/' || d.deployment = x.id
      and coalesce(d.updated_at, d.created_at) >= x.admitted_at)) found
where id is distinct from $3

-- name: count_members
select count(*) from members m join people p on p.id = m.person where m.organisation = $1

-- name: count_workspaces
select count(*) from (
  select workspace from workspace_homes where organisation = $1
  union select n.id from names n where $1 = 'main' and n.kind = 'workspace'
    and not exists (select from workspace_homes h where h.workspace = n.id)) found

-- What a crash kept from being stored or deployed is forgotten after an hour.

-- name: forget_amounts
delete from admitted_amounts where admitted_at < clock_timestamp() - interval '1 hour'

-- name: admit_amount
insert into admitted_amounts (kind, id, organisation, workspace, amount) values ($1, $2, $3, $4, $5)
on conflict (kind, id) do update set admitted_at = clock_timestamp(), amount = excluded.amount

-- name: withdraw_amount
delete from admitted_amounts where kind = $1 and id = $2


-- == Counters =============================================================================================

-- Add $4 to a counter, unless it would be more than $5. The row is locked until the transaction ends. The
-- caller has compared $4 with $5, for the first use.

-- name: take
insert into quota_use as u (holder, name, since, used)
values ($1, $2, date_trunc($3, clock_timestamp(), 'UTC'), $4)
on conflict (holder, name) do update set since = excluded.since,
  used = case when u.since = excluded.since then u.used else 0 end + excluded.used
where case when u.since = excluded.since then u.used else 0 end + excluded.used <= $5
returning used

-- name: used
select used from quota_use
where holder = $1 and name = $2 and since = date_trunc($3, clock_timestamp(), 'UTC')

-- name: window_end
select date_trunc($1, clock_timestamp(), 'UTC') + ('1 ' || $1)::interval as ends_at,
  extract(epoch from date_trunc($1, clock_timestamp(), 'UTC') + ('1 ' || $1)::interval
    - clock_timestamp())::float8 as left_s
