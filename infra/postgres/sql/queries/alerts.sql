-- Alerts: what `infra/maintenance/alerts.py` writes and asks.
-- How this file is read: `infra/postgres/queries.py`.

-- When alerts began. Nothing that ended earlier is told.

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

-- name: put
insert into alerts (run, kind, channel, content)
select $1, $2, c.channel, $4 from unnest($3::text[]) as c (channel) on conflict do nothing

-- name: due
select run, kind, channel, content, attempts from alerts
where sent_at is null and due_at <= clock_timestamp() and channel = any ($1)
order by due_at, run, kind, channel limit $2

-- name: sent
update alerts set sent_at = clock_timestamp(), error = null
where run = $1 and kind = $2 and channel = $3

-- name: failed
update alerts set attempts = attempts + 1, error = $4,
  due_at = coalesce(clock_timestamp() + make_interval(secs => $5), 'infinity')
where run = $1 and kind = $2 and channel = $3
