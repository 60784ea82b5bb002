-- Imports of evaluations while their files arrive (`infra/blobs/evaluation_imports.py`).
-- How this file is read: `infra/spine/postgres/queries.py`.

-- name: add
insert into evaluation_imports (id, evaluation, number, workspace, content) values ($1, $2, $3, $4, $5)
on conflict do nothing

-- name: find
select id, evaluation, number, workspace, content, created_at from evaluation_imports where id = $1

-- name: uploads
select f.path, f.upload, u.status from evaluation_import_files f join uploads u on u.id = f.upload where f.import = $1

-- name: set_upload
insert into evaluation_import_files (import, path, upload) values ($1, $2, $3)
on conflict (import, path) do update set upload = excluded.upload

-- name: drop_upload
delete from evaluation_import_files where import = $1 and path = $2

-- Two sessions that claim at the same moment wait for each other.

-- name: lock_evaluation
select pg_advisory_xact_lock(hashtextextended('evaluation-import/' || $1, 0))

-- name: claim
update evaluation_imports i set claimed_until = clock_timestamp() + make_interval(secs => $2)
where id = $1 and not exists (
  select from evaluation_imports o
  where o.evaluation = i.evaluation and o.id <> i.id and o.claimed_until > clock_timestamp())
returning id

-- name: release
update evaluation_imports set claimed_until = null where id = $1

-- name: forget_old
delete from evaluation_imports where created_at < clock_timestamp() - interval '7 days'
