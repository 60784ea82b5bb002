-- Deployments and what was used of them: what `infra/readmodel/deployments.py` asks. How this file is read:
-- `infra/spine/postgres/queries.py`.

-- The use is counted under the full name (`schemas.deployments.ServedModel.full_name`), so that a name which two
-- workspaces have is counted for each.

-- part: select_deployments
select d.key, d.deployment, d.workspace, w.name as workspace_name, d.status, d.number, d.served, d.pending, d.error,
  d.requested_by, d.created_at, d.updated_at, d.deployed_at, coalesce(u.requests, 0)::bigint as requests,
  coalesce(u.prompt_tokens, 0)::bigint as prompt_tokens,
  coalesce(u.completion_tokens, 0)::bigint as completion_tokens
from deployments d left join workspaces w on w.workspace = d.workspace left join lateral (
  select sum(requests) as requests, sum(prompt_tokens) as prompt_tokens,
    sum(completion_tokens) as completion_tokens
  from inference_usage where model = d.served::json ->> 'base_name' || ':' || d.key) u on true

-- name: deployments
{select_deployments} where $1::text[] is null or d.workspace = any($1)
order by d.status = 'active' desc, d.created_at desc, d.key

-- name: deployments_of_name
{select_deployments} where d.deployment = $2 and ($1::text[] is null or d.workspace = any($1))
order by d.key

-- name: active_deployments
select served from deployments where status = 'active' order by number

-- name: active_with_workspaces
select d.served, w.name as workspace_name
from deployments d left join workspaces w on w.workspace = d.workspace
where d.status = 'active' order by d.number

-- name: usage_of_model
select u.api_key, t.name as api_key_name, t.owner, sum(u.requests)::bigint as requests,
  sum(u.prompt_tokens)::bigint as prompt_tokens,
  sum(u.completion_tokens)::bigint as completion_tokens, max(u.last_at) as last_at
from inference_usage u left join api_keys t on t.id = u.api_key where u.model = $1
group by u.api_key, t.name, t.owner order by completion_tokens desc, u.api_key limit 100
