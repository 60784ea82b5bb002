-- Uploads in parts (`infra/blobs/uploads.py`).
-- How this file is read: `infra/spine/postgres/queries.py`.

-- part: columns
id, purpose, size, part_size, status, actor, workspace, organisation, created_at

-- name: begin
insert into uploads (id, purpose, size, part_size, actor, workspace, organisation)
values ($1, $2, $3, $4, $5, $6, $7)
returning {columns}

-- name: find
select {columns} from uploads where id = $1

-- The newest upload that can go on, of the same bytes to the same end, of what the sender may send to.

-- name: find_unfinished
select {columns} from uploads
where purpose = $1 and size = $2 and workspace is not distinct from $3
  and organisation is not distinct from $4 and status in ('open', 'complete')
  and created_at > clock_timestamp() - interval '12 hours'
order by created_at desc limit 1

-- name: parts
select part, etag, uri from upload_parts where upload = $1

-- Returns the blob of the part that was there before, and no row when the upload is not open. The lock on the
-- upload makes parts and its end wait for each other.

-- name: put_part
with held as (
  select id from uploads where id = $1 and status = 'open' for share
), former as (
  select p.uri from upload_parts p, held h where p.upload = h.id and p.part = $2 for update of p
), put as (
  insert into upload_parts (upload, part, etag, uri) select id, $2, $3, $4 from held
  on conflict (upload, part) do update set etag = excluded.etag, uri = excluded.uri
  returning upload
)
select (select uri from former) as uri from put

-- name: complete
update uploads u set status = 'complete'
where id = $1 and status = 'open'
  and (select array_agg(p.etag order by p.part) from upload_parts p where p.upload = u.id) = $2::text[]
returning id

-- name: close
with ended as (update uploads set status = 'closed' where id = $1 returning id)
select uri from upload_parts where upload = $1

-- name: forget_parts
delete from upload_parts where upload = $1

-- name: unfinished
select id from uploads
where status = 'open' and created_at < $1 or status = 'complete' and created_at < $1 - interval '7 days'
order by created_at limit 1000

-- name: forget_old
delete from uploads where status = 'closed' and created_at < $1

-- name: is_part
select exists (select from upload_parts where uri = $1)
