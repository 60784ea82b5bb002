-- The checkpoints of all runs: what `infra/readmodel/checkpoints.py` asks. How this file is read:
-- `infra/spine/postgres/queries.py`.

-- part: shown
($1::text[] is null or r.workspace = any($1::text[]))
and ($2::text is null or r.config::json -> 'advanced' ->> 'tuning' = $2)

-- name: page_of_checkpoints
select c.run, r.name as run_name, c.step, r.name || '@' || c.step as ref, r.model,
  r.config::json -> 'advanced' ->> 'tuning' as tuning, r.workspace, c.reward, c.adapter_sha256, c.created_at
from checkpoints c join runs r using (run) where {shown}
order by c.created_at desc, c.run, c.step desc limit $3 offset $4

-- name: count_checkpoints
select count(*) from checkpoints c join runs r using (run) where {shown}
