-- Quotas: what `infra/identity/quotas.py` writes and asks. How this file is read: `infra/spine/postgres/queries.py`.

-- == Limits ===============================================================================================

-- name: limits_of
select name, most from workspace_quotas where workspace = $1

-- name: request_limits
select workspace, most from workspace_quotas where name = 'requests_per_minute'

-- name: set_limit
insert into workspace_quotas (workspace, name, most) values ($1, $2, $3)
on conflict (workspace, name) do update set most = excluded.most

-- name: unset_limit
delete from workspace_quotas where workspace = $1 and name = $2


-- == Runs =================================================================================================

-- Two control processes that admit runs for one holder take turns until their transactions end.

-- name: lock_holder
select pg_advisory_xact_lock(hashtextextended($1, 35))

-- name: is_admitted
select exists (select from admitted_runs where run = $1)

-- part: runs_of_holder
(a.workspace = $1 or a.key = $2)

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
insert into admitted_runs (run, stream, workspace, key) values ($1, $2, $3, $4) on conflict do nothing

-- name: withdraw_run
delete from admitted_runs where run = $1

-- What the workers hold of the runs of a workspace: the places that a claim compares with the quota.

-- name: count_samples
select coalesce(sum(e.size), 0) from effects e join run_gates g on g.run_id = e.run_id
where e.lane = 'generate' and e.worker is not null and g.workspace = $1


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
