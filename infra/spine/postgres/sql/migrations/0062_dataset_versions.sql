-- A dataset has versions: the first has the id of the dataset (its series), and each later one an id of its own.

alter table datasets add column version integer not null default 1, add column series text;
create index datasets_by_series on datasets (series, version) where series is not null;

-- Remove a version of a dataset: the notice is then the only event of its stream. With its last version the dataset's
-- name is free.
create function remove_dataset_version(
    p_dataset text, p_series text, p_is_last boolean, p_uris text[],
    t_id uuid, t_type text, t_schema integer, t_data text, t_cause uuid
) returns table (r_position bigint, r_xid xid8, r_time timestamptz) language plpgsql as $$
declare
    own text := 'dataset-' || p_dataset;
    last record;
begin
    perform from streams s where s.stream = own for update;
    select e.xid, e.position, e.type into last from events e where e.stream = own
    order by e.version desc limit 1;
    if not found or last.type <> 'rl.dataset.registered' then
        raise exception '%', own using errcode = 'HR001';
    end if;
    perform begin_removal(last.xid, last.position);
    delete from events e where e.stream = own;
    if p_is_last then
        delete from names n where n.kind = 'dataset' and n.id = p_series;
    end if;
    delete from dataset_uploads u where u.id = p_dataset or u.dataset = p_dataset;
    insert into discarded_blobs (uri) select unnest(p_uris)
        on conflict (uri) do update set at = clock_timestamp();
    return query select * from leave_notice(
        own, 1, p_dataset, t_id, t_type, t_schema, t_data, t_cause);
end $$;

do $$ begin
    execute format('alter function remove_dataset_version(text, text, boolean, text[], uuid, text, integer, text, uuid)'
                   ' security definer set search_path = %I, pg_temp', current_schema());
end $$;

-- Uploads in parts: what is expected, and the parts that have arrived. Their bytes are blobs below `uploads/`. A
-- dataset that is uploaded in stages is checked after its upload is complete, by any control process.

create table url_keys (
    id         integer primary key check (id = 1),
    sealed     bytea not null,
    created_at timestamptz not null default clock_timestamp()
);

create table uploads (
    id         text primary key,
    purpose    text not null,
    size       bigint not null,
    part_size  bigint not null,
    status     text not null default 'open' check (status in ('open', 'complete', 'closed')),
    actor      text not null,
    workspace  text,
    organisation text,
    created_at timestamptz not null default clock_timestamp()
);

create table upload_parts (
    upload text not null references uploads on delete cascade,
    part   integer not null,
    etag   text not null,
    uri    text not null,
    primary key (upload, part)
);

alter table dataset_uploads
    add column file_size bigint,
    add column overwrites boolean not null default false,
    add column mapping text,
    add column sha256 text,
    add column series text,
    add column dataset text,
    add column attempts integer not null default 0,
    add column claimed_until timestamptz;

-- Of the uploads of one new name, one is checked at a time.
create unique index dataset_uploads_processing on dataset_uploads (series)
    where status = 'processing' and file_size is not null and not overwrites;
create index dataset_uploads_to_check on dataset_uploads (claimed_until nulls first)
    where status = 'processing' and file_size is not null;

create table dataset_upload_lines (
    upload  text not null references dataset_uploads on delete cascade,
    line    integer not null,
    at      timestamptz not null default clock_timestamp(),
    level   text not null,
    step    text not null,
    message text not null,
    primary key (upload, line)
);

select grant_processes();
