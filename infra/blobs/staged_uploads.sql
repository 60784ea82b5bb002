-- Uploads of datasets in stages: announced, sent, checked (`infra/blobs/staged_uploads.py`).
-- How this file is read: `infra/spine/postgres/queries.py`.

-- part: columns
u.id, u.name, u.file_name, u.file_size, u.overwrites, u.mapping, u.sha256, u.series, u.dataset,
  u.error, u.issues, u.attempts, u.workspace, u.organisation, u.created_at,
  case when u.status = 'pending' and exists (select from upload_parts p where p.upload = u.id)
       then 'uploading' else u.status end as status

-- name: add
insert into dataset_uploads as u
  (id, name, file_name, file_size, overwrites, mapping, sha256, series, status, workspace, organisation)
values ($1, $2, $3, $4, $5, $6, $7, $8, 'pending', $9, $10)
returning {columns}

-- name: find
select {columns} from dataset_uploads u where u.id = $1 and u.file_size is not null

-- name: find_named
select id from dataset_uploads
where name = $1 and file_size is not null and status <> 'cancelled'
  and ($2::text[] is null or workspace = any($2) or workspace is null and coalesce(organisation, 'main') = $3)
order by created_at desc limit 1

-- The newest upload of the same content that waits for its parts.

-- name: find_unfinished
select {columns} from dataset_uploads u join uploads t on t.id = u.id
where u.series = $1 and u.sha256 = $2 and u.file_size = $3 and u.overwrites = $4 and u.mapping = $5
  and u.file_name = $6 and u.status = 'pending'
  and t.status = 'open' and t.created_at > clock_timestamp() - interval '12 hours'
order by u.created_at desc limit 1

-- name: find_processing
select id from dataset_uploads
where series = $1 and status = 'processing' and file_size is not null and not overwrites and id <> $2 limit 1

-- name: begin_check
update dataset_uploads u set status = 'processing', claimed_until = null
where u.id = $1 and u.status = 'pending' returning {columns}

-- name: claim
update dataset_uploads u
set claimed_until = clock_timestamp() + make_interval(secs => $1), attempts = u.attempts + 1
where u.id = (
  select c.id from dataset_uploads c
  where c.status = 'processing' and c.file_size is not null
    and (c.claimed_until is null or c.claimed_until < clock_timestamp())
  order by c.claimed_until nulls first limit 1 for update skip locked)
returning {columns}

-- name: renew
update dataset_uploads set claimed_until = clock_timestamp() + make_interval(secs => $3)
where id = $1 and attempts = $2 and status = 'processing' returning id

-- name: release
update dataset_uploads set claimed_until = clock_timestamp() + make_interval(secs => $3), attempts = attempts - 1
where id = $1 and attempts = $2 and status = 'processing'

-- name: finish
update dataset_uploads
set status = $3, dataset = $4, error = $5, issues = $6, uploader = $7, claimed_until = null,
  rejected_at = case when $3 = 'error' then clock_timestamp() end
where id = $1 and attempts = $2 and status = 'processing' returning id

-- name: cancel
update dataset_uploads set status = 'cancelled' where id = $1 and status = 'pending' returning id

-- name: cancel_abandoned
update dataset_uploads u set status = 'cancelled'
where u.status = 'pending' and u.file_size is not null
  and not exists (select from uploads t where t.id = u.id and t.status <> 'closed')
returning id

-- name: add_lines
insert into dataset_upload_lines (upload, line, level, step, message)
select $1, coalesce((select max(line) from dataset_upload_lines where upload = $1), 0) + n.number,
  n.level, n.step, n.message
from unnest($2::text[], $3::text[], $4::text[]) with ordinality as n (level, step, message, number)
where exists (select from dataset_uploads where id = $1)

-- name: lines
select line, at, level, step, message from dataset_upload_lines
where upload = $1 and ($2::integer is null or line < $2) order by line desc limit $3

-- name: upload_of_dataset
select id from dataset_uploads where dataset = $1 order by created_at limit 1
