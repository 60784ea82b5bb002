-- Alerts: what `infra/operations/maintenance/alerts.py` writes and asks.
-- How this file is read: `infra/spine/postgres/queries.py`.

-- When alerts were first looked for. Nothing that ended earlier is told.

-- name: begin
insert into alerts (run, kind, channel, content, sent_at)
values ('', 'begin', '', '', clock_timestamp()) on conflict do nothing

-- part: run_to_tell
r.run, r.name, r.status, coalesce(r.current_step, 0) as step, r.total_steps, r.reward, r.error

-- name: ended_runs
select {run_to_tell} from runs r
where r.status in ('finished', 'stopped', 'failed', 'crashed', 'killed') and r.archived_at is null
and r.completed_at >= (select b.created_at from alerts b where b.run = '' and b.kind = 'begin')
and not exists (select from alerts a where a.run = r.run and a.kind in ('ended', 'failed'))
order by r.completed_at, r.run limit 100

-- A run that waits for an operator is not stalled.

-- name: stalled_runs
select {run_to_tell} from runs r
where r.status = 'running' and r.phase <> 'paused'
and coalesce(r.last_at, r.started_at, r.created_at) < clock_timestamp() - make_interval(mins => $1)
and not exists (select from dead_letters d where d.about = r.run and d.pauses and d.redriven_at is null)
and not exists (select from alerts a
                where a.run = r.run and a.kind = 'stalled at step ' || coalesce(r.current_step, 0))
order by r.created_at, r.run limit 100

-- A page of the runs whose curves are looked at, after a run's id.

-- name: runs_in_training
select {run_to_tell} from runs r
where r.status = 'running' and r.current_step >= $1 and r.run > $2
and not exists (select from alerts a where a.run = r.run and a.kind = 'collapsed')
order by r.run limit $3

-- A row without a channel says that the alert was made, also when nobody is told. So a channel or a target that is
-- set later is not told of what happened before.

-- name: put
insert into alerts (run, kind, channel, content, sent_at)
select $1, $2, '', '', clock_timestamp()
union all
select $1, $2, c.channel, $4, null from unnest($3::text[]) as c (channel)
union all
select $1, $2, t.id, $4, null from alert_targets t join runs r on r.workspace = t.workspace
where r.run = $1 and $5 = any (t.kinds)
on conflict do nothing

-- The next of each channel, so that none waits for another.

-- name: due
select run, kind, channel, content, attempts from (
  select a.*, row_number() over (partition by a.channel order by a.due_at, a.run, a.kind) as place from alerts a
  where a.sent_at is null and a.due_at <= clock_timestamp()
  and (a.channel = any ($1) or exists (select from alert_targets t where t.id = a.channel))
) d where place <= $2 order by place, due_at, channel limit 1000

-- name: sent
update alerts set sent_at = clock_timestamp(), error = null
where run = $1 and kind = $2 and channel = $3

-- name: failed
update alerts set attempts = attempts + 1, error = $4,
  due_at = coalesce(clock_timestamp() + make_interval(secs => $5), 'infinity')
where run = $1 and kind = $2 and channel = $3


-- == Targets ==============================================================================================

-- part: shown_target
id, medium, shown, kinds, created_by, created_at, error

-- name: targets_of
select {shown_target} from alert_targets where workspace = $1 order by created_at, id

-- name: add_target
insert into alert_targets (id, workspace, medium, shown, address, secret, kinds, created_by)
select $1, $2, $3, $4, $5, $6, $7, $8
where (select count(*) from alert_targets where workspace = $2) < $9
returning {shown_target}

-- name: remove_target
with gone as (delete from alert_targets where workspace = $1 and id = $2 returning id),
  untold as (delete from alerts a using gone g where a.channel = g.id)
select id from gone

-- name: rotate_target
update alert_targets set secret = $3 where workspace = $1 and id = $2 and secret is not null returning id

-- name: open_target
select workspace, medium, address, secret from alert_targets where id = $1

-- name: note_target
update alert_targets set error = $2 where id = $1 and error is distinct from $2

-- name: sealed_targets
select id, workspace, address, secret from alert_targets

-- name: rewrap_target
update alert_targets set address = $4, secret = $5
where id = $1 and address = $2 and secret is not distinct from $3
