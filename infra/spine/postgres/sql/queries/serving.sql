-- Deployments, the processes that serve them, and what was used of them: what `infra/model_api/serving/` and
-- `infra/readmodel/deployments.py` write and ask. How this file is read: `infra/spine/postgres/queries.py`.

-- == Deployments ==========================================================================================

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
{select_deployments} where $1::text is null or {owner} = $1
order by d.status = 'active' desc, d.created_at desc, d.deployment

-- name: deployment
{select_deployments} where d.deployment = $2 and ($1::text is null or {owner} = $1)

-- name: active_deployments
select deployment, number, served from deployments where status = 'active' order by number

-- == Usage ================================================================================================

-- name: add_usage
insert into inference_usage as u (api_key, model, requests, prompt_tokens, completion_tokens)
select * from unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[])
on conflict (api_key, model, day) do update set requests = u.requests + excluded.requests,
  prompt_tokens = u.prompt_tokens + excluded.prompt_tokens,
  completion_tokens = u.completion_tokens + excluded.completion_tokens, last_at = clock_timestamp()

-- name: usage_of_model
select u.api_key, t.name as api_key_name, t.owner, sum(u.requests)::bigint as requests,
  sum(u.prompt_tokens)::bigint as prompt_tokens,
  sum(u.completion_tokens)::bigint as completion_tokens, max(u.last_at) as last_at
from inference_usage u left join api_keys t on t.id = u.api_key where u.model = $1
group by u.api_key, t.name, t.owner order by completion_tokens desc, u.api_key limit 100

-- == Processes that serve =================================================================================

-- name: announce_server
insert into serving_doors (worker, url) values ($1, $2)
on conflict (worker) do update set url = excluded.url, updated_at = clock_timestamp()

-- name: forget_old_servers
delete from serving_doors d where not exists (select from workers w
where w.id = d.worker) and updated_at < clock_timestamp() - interval '1 hour'

-- name: live_servers
select d.worker, d.url from serving_doors d join workers w on w.id = d.worker
where w.expires_at > clock_timestamp() order by d.updated_at desc

-- name: grant_serving
with expired as (delete from serving_grants where expires_at < clock_timestamp())
insert into serving_grants (sha256, worker, expires_at)
values ($1, $2, clock_timestamp() + make_interval(secs => $3))

-- name: find_grant
select extract(epoch from expires_at - clock_timestamp())::float8 from serving_grants
where sha256 = $1 and worker = $2 and expires_at > clock_timestamp()

-- name: is_training
select exists (select from runs where status = 'running')
