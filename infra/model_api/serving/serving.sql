-- The processes that serve deployments, and what they count. How this file is read:
-- `infra/spine/postgres/queries.py`.

-- == Usage ================================================================================================

-- name: add_usage
insert into inference_usage as u (api_key, model, requests, prompt_tokens, completion_tokens)
select * from unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[])
on conflict (api_key, model, day) do update set requests = u.requests + excluded.requests,
  prompt_tokens = u.prompt_tokens + excluded.prompt_tokens,
  completion_tokens = u.completion_tokens + excluded.completion_tokens, last_at = clock_timestamp()

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
