-- The cost ledger: what `infra/costs/ledger.py` asks.

-- A cost belongs to the run or the evaluation that paid it. Its workspace and its creator are theirs.

-- part: paid
costs c left join runs r on r.run = c.owner left join evaluations v on v.evaluation = c.owner

-- part: seen
($1::text[] is null or c.owner = any ($1::text[])) and ($2::timestamptz is null or c.at >= $2)
  and ($3::text[] is null or coalesce(r.workspace, v.workspace) = any ($3::text[]))

-- part: by_run
c.owner

-- part: by_workspace
coalesce(r.workspace, v.workspace, '')

-- part: by_organisation
coalesce((select h.organisation from workspace_homes h where h.workspace = coalesce(r.workspace, v.workspace)), '')

-- part: by_user
coalesce(r.creator, '')

-- part: by_step
c.owner || '@' || coalesce(c.step, -1)

-- part: by_sample
coalesce(c.sample, '')

-- name: sums
select {key: by_run | by_workspace | by_organisation | by_user | by_step | by_sample} as key,
  c.effect, c.device, sum(c.device_s)::float8 as device_s, sum(c.wasted_s)::float8 as wasted_s,
  sum(c.sampled)::bigint as sampled, sum(c.trained)::bigint as trained, sum(c.discarded)::bigint as discarded,
  sum(c.calls_usd)::float8 as calls_usd, sum(c.calls_tokens)::bigint as calls_tokens,
  sum(c.stored_bytes)::bigint as stored_bytes, max(c.at) as last_at,
  max(coalesce(r.name, v.name)) as run_name, bool_and(r.run is not null) as is_run,
  max((select w.name from workspaces w where w.workspace = coalesce(r.workspace, v.workspace))) as workspace_name
from {paid}
where {seen}
group by 1, c.effect, c.device

-- The ends of the curve by which the cost of a reward point is told: of validations if there were two, else of the
-- rewards of steps.

-- name: rewards
select m.run, m.key, (array_agg(m.value order by m.step))[1] as first,
  (array_agg(m.value order by m.step desc))[1] as last, count(*) as points
from metric_points m
where m.run = any ($1::text[]) and m.key in ('eval/validation/reward', 'rollout/raw_reward')
group by m.run, m.key

-- Runs of the same model whose steps cost something, newest first, for an estimate, with the number of their own steps:
-- a fork begins after steps that its parent paid. A run with steps from before the ledger is left out.

-- name: runs_of_model
select r.run, r.name, r.config, r.current_step - coalesce(r.parent_step, 0) as steps from runs r
where r.model = $1 and r.current_step > coalesce(r.parent_step, 0)
  and ($2::text[] is null or r.workspace = any ($2::text[]))
  and exists (select from costs c where c.owner = r.run and c.device is not null)
  and not exists (select from costs c where c.owner = r.run and c.trained > 0 and c.device is null)
order by r.created_at desc limit 50

-- What leaves the ledger when a run is archived (`drop_costs_without_events` of the read model removes the same
-- rows), without its blobs, which are in the archive.

-- name: summary_of_run
select c.effect, c.device, sum(c.device_s)::float8 as device_s, sum(c.wasted_s)::float8 as wasted_s,
  sum(c.sampled)::bigint as sampled, sum(c.trained)::bigint as trained, sum(c.discarded)::bigint as discarded,
  sum(c.calls_usd)::float8 as calls_usd, sum(c.calls_tokens)::bigint as calls_tokens, max(c.at) as last_at
from costs c where c.owner = $1 and coalesce(c.effect, '') not in ('SaveCheckpoint', 'VerifyRun')
group by c.effect, c.device order by c.effect, c.device
