-- Deployments and what was used of them: what `infra/readmodel/deployments.py` asks. How this file is read:
-- `infra/spine/postgres/queries.py`.

-- A name that another workspace deploys after it was free belongs to that workspace.

-- part: owner
case when d.served is null then d.workspace else d.served::json ->> 'workspace' end

-- part: select_deployments
select d.deployment, {owner} as workspace, d.status, d.number, d.served, d.pending, d.error, d.requested_by,
  d.created_at, d.updated_at, d.deployed_at, coalesce(u.requests, 0)::bigint as requests,
  coalesce(u.prompt_tokens, 0)::bigint as prompt_tokens,
  coalesce(u.completion_tokens, 0)::bigint as completion_tokens
from deployments d left join lateral (
  select sum(requests) as requests, sum(prompt_tokens) as prompt_tokens,
    sum(completion_tokens) as completion_tokens
  from inference_usage where model = d.served::json ->> 'base_name' || ':' || d.deployment) u on true

-- name: deployments
{select_deployments} where $1::text[] is null or {owner} = any($1)
order by d.status = 'active' desc, d.created_at desc, d.deployment

-- name: deployment
{select_deployments} where d.deployment = $2 and ($1::text[] is null or {owner} = any($1))

-- Whether a name was used by another workspace than this one.

-- name: is_deployment_of_other
select exists (select from deployments d where d.deployment = $1 and {owner} is distinct from $2)

-- name: active_deployments
select deployment, number, served from deployments where status = 'active' order by number

-- name: usage_of_model
select u.api_key, t.name as api_key_name, t.owner, sum(u.requests)::bigint as requests,
  sum(u.prompt_tokens)::bigint as prompt_tokens,
  sum(u.completion_tokens)::bigint as completion_tokens, max(u.last_at) as last_at
from inference_usage u left join api_keys t on t.id = u.api_key where u.model = $1
group by u.api_key, t.name, t.owner order by completion_tokens desc, u.api_key limit 100
