-- Retention: the history of an ended run can leave the database, into an archive or for good. Events stay facts:
-- no process may delete one by itself. These functions do it as the owner, each in one transaction that also
-- leaves an event which says what happened, and only for what has ended and was read by every consumer.

-- When the history of a run left the read model, and when it last came back.
alter table runs add column archived_at timestamptz;
alter table runs add column restored_at timestamptz;

-- Runs (and validations of runs) whose events were removed, and small artifacts that those events named. Their
-- bytes are collected by reachability some time later (infra/orphans.py).
create table removals (
    owner text primary key,
    at    timestamptz not null default clock_timestamp()
);
create table discards (
    sha256 text primary key,
    at     timestamptz not null default clock_timestamp()
);
-- Blobs that are not a run's (contents of datasets), which a removed event named.
create table discarded_blobs (
    uri text primary key,
    at  timestamptz not null default clock_timestamp()
);
select grant_processes();

-- As before, but for the transaction in which one of the functions below runs.
create or replace function refuse_rewriting() returns trigger language plpgsql as $$
begin
    if tg_op = 'DELETE' and current_setting('headrace.removes', true) = pg_current_xact_id()::text then
        return null;
    end if;
    raise exception 'events are facts: % is refused', tg_op using errcode = 'HR003';
end $$;

-- Raises HR004 with the reason unless these events may be removed by this session: every consumer has read
-- beyond the last of them, at (p_xid, p_position).
create function begin_removal(p_xid xid8, p_position bigint) returns void language plpgsql as $$
declare
    behind text;
begin
    if not pg_has_role(session_user, 'headrace_worker', 'member') then
        raise exception '% may not act as headrace_worker', session_user using errcode = '42501';
    end if;
    select w.consumer into behind from watermarks w
    where (w.xid, w.position) < (p_xid, p_position) order by w.consumer limit 1;
    if behind is null and not exists (select from watermarks w where w.consumer = 'project') then
        behind := 'project';
    end if;
    if behind is not null then
        raise exception 'BEHIND %', behind using errcode = 'HR004';
    end if;
    perform set_config('headrace.removes', pg_current_xact_id()::text, true);
end $$;

-- Leave the event that says what happened, as version p_version of its stream.
create function leave_notice(
    p_stream text, p_version integer, p_about text,
    t_id uuid, t_type text, t_schema integer, t_data text, t_cause uuid
) returns table (r_position bigint, r_xid xid8, r_time timestamptz) language sql as $$
    update streams set version = p_version where stream = p_stream;
    insert into events (id, stream, version, type, schema_version, data, run_id, causation, correlation)
    values (t_id, p_stream, p_version, t_type, t_schema, t_data::json, p_about, t_cause, t_cause)
    returning position, xid, time;
$$;

-- Remove the history of an ended run. Kept (p_whole false): its request, its checkpoints, and the notice as the
-- second event of its stream; p_events says how many events the archive holds. p_whole: only the notice is
-- kept, and the run's names are free. The closed gate stays in both cases, and so does the run's own stream,
-- with a version that fits what is in it. Raises HR001 when other events are there than were archived.
create function remove_run(
    p_run text, p_whole boolean, p_events bigint,
    t_id uuid, t_type text, t_schema integer, t_data text, t_cause uuid
) returns table (r_position bigint, r_xid xid8, r_time timestamptz) language plpgsql as $$
declare
    own text := 'run-' || p_run;
    owners text[];
    last record;
    removed bigint;
begin
    perform from run_gates g where g.run_id = p_run and g.state = 'closed' for update;
    if not found then
        raise exception 'OPEN' using errcode = 'HR004';
    end if;
    owners := array[p_run] || array(
        select e.data ->> 'evaluation' from events e
        where e.stream = own and e.type = 'rl.evaluation.requested');
    if exists (select from effects f where f.run_id = any (owners)
               or (f.type = 'VerifyRun' and f.data ->> 'run' = p_run)) then
        raise exception 'WORK' using errcode = 'HR004';
    end if;
    select e.xid, e.position into last from events e where e.run_id = any (owners)
    order by e.xid desc, e.position desc limit 1;
    if not found then
        raise exception '%', own using errcode = 'HR001';
    end if;
    perform begin_removal(last.xid, last.position);
    create temporary table gone on commit drop as
        select e.position, e.xid, e.stream from events e
        where e.run_id = any (owners) and e.stream not like 'dead-letter-%'
          and (p_whole or (e.stream <> 'checkpoint-' || p_run and not (e.stream = own and e.version = 1)));
    analyze gone;
    select count(*) into removed from gone;
    if not p_whole and removed <> p_events then
        raise exception '%', own using errcode = 'HR001';
    end if;
    insert into discards (sha256)
        select distinct m[1] from gone g join events e on e.xid = g.xid and e.position = g.position,
            regexp_matches(e.data::text, '"row:([0-9a-f]{64})"', 'g') m
        on conflict (sha256) do update set at = clock_timestamp();
    delete from events e using gone g where e.xid = g.xid and e.position = g.position;
    delete from streams s where s.stream <> own and s.stream in (select g.stream from gone g);
    delete from snapshots s where s.stream = own or s.stream in (select g.stream from gone g);
    insert into removals (owner) select unnest(owners)
        on conflict (owner) do update set at = clock_timestamp();
    drop table gone;
    if p_whole then
        delete from names n where n.kind = 'run' and n.id = p_run;
    end if;
    return query select * from leave_notice(
        own, case when p_whole then 1 else 2 end, p_run, t_id, t_type, t_schema, t_data, t_cause);
end $$;

-- Remove the notice of an archived run whose events were inserted again in this transaction. Where this
-- database came from another cluster meanwhile, the transaction ids of what was archived mean nothing here:
-- the caller has to insert them as the notice's own are, which is checked. No consumer gets them again.
create function restore_run(
    p_run text, p_events bigint,
    t_id uuid, t_type text, t_schema integer, t_data text, t_cause uuid
) returns table (r_position bigint, r_xid xid8, r_time timestamptz) language plpgsql as $$
declare
    own text := 'run-' || p_run;
    owners text[];
    notice record;
    head integer;
    found_events bigint;
begin
    perform from run_gates g where g.run_id = p_run and g.state = 'closed' for update;
    select e.xid, e.position into notice from events e
    where e.stream = own and e.version = 2 and e.type = 'rl.run.archived';
    if not found then
        raise exception '%', own using errcode = 'HR001';
    end if;
    perform begin_removal(notice.xid, notice.position);
    delete from events e where e.xid = notice.xid and e.position = notice.position;
    owners := array[p_run] || array(
        select e.data ->> 'evaluation' from events e
        where e.stream = own and e.type = 'rl.evaluation.requested');
    select count(*) into found_events from events e
    where e.run_id = any (owners) and e.stream not like 'dead-letter-%'
      and e.stream <> 'checkpoint-' || p_run and not (e.stream = own and e.version = 1);
    if found_events <> p_events then
        raise exception '%', own using errcode = 'HR001';
    end if;
    insert into inbox (consumer, event_id)
        select w.consumer, e.id from watermarks w join events e on (e.xid, e.position) > (w.xid, w.position)
        where w.consumer <> 'project' and e.run_id = any (owners)
        on conflict do nothing;
    insert into streams (stream, version)
        select e.stream, max(e.version) from events e
        where e.run_id = any (owners) and e.stream not like 'dead-letter-%' group by e.stream
        on conflict (stream) do update set version = excluded.version;
    delete from snapshots s where s.stream = own;
    delete from removals r where r.owner = any (owners);
    select s.version into head from streams s where s.stream = own;
    return query select * from leave_notice(
        own, head + 1, p_run, t_id, t_type, t_schema, t_data, t_cause);
end $$;

-- Remove the registration of a dataset; the notice is the only event of its stream then.
create function remove_dataset(
    p_dataset text, p_uris text[],
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
    delete from names n where n.kind = 'dataset' and n.id = p_dataset;
    delete from dataset_uploads u where u.id = p_dataset;
    insert into discarded_blobs (uri) select unnest(p_uris)
        on conflict (uri) do update set at = clock_timestamp();
    return query select * from leave_notice(
        own, 1, p_dataset, t_id, t_type, t_schema, t_data, t_cause);
end $$;

-- Whoever calls them needs nothing but the role of processes, which the first of them asks for; what they call
-- themselves is for them alone.
do $$
declare
    f regprocedure;
begin
    for f in select p.oid::regprocedure from pg_proc p
             where p.pronamespace = current_schema()::regnamespace
               and p.proname in ('remove_run', 'restore_run', 'remove_dataset') loop
        execute format('alter function %s security definer set search_path = %I, pg_temp',
                       f, current_schema());
    end loop;
    for f in select p.oid::regprocedure from pg_proc p
             where p.pronamespace = current_schema()::regnamespace
               and p.proname in ('begin_removal', 'leave_notice') loop
        execute format('revoke execute on function %s from public', f);
    end loop;
end $$;
