-- Evaluations that have ended, and records of what the platform did, can leave the log when they are old.

-- The types of events that records end with, or consist of.
create function is_record(p_type text) returns boolean language sql immutable as $$
    select p_type in (
        'rl.evaluation.completed', 'rl.verification.completed', 'rl.hub-push.pushed', 'rl.hub-push.failed',
        'rl.status.decided', 'rl.status.posted',
        'rl.workspace.push-received', 'rl.workspace.hook-pinged', 'rl.workspace.refs-check-requested',
        'rl.model.deploy-requested', 'rl.model.deployed', 'rl.model.deploy-failed',
        'rl.model.deploy-skipped', 'rl.model.undeploy-requested', 'rl.model.undeployed')
$$;
create index events_records on events (type, time) where is_record(type);

-- Streams from which old events were removed: versions up to this one may be missing.
create table trimmed_streams (
    stream  text primary key,
    version integer not null
);

-- What ended before p_before and can be removed whole: evaluations, verifications and pushes to a hub, the longest
-- ended first. A validation belongs to its run and goes with it, and what was retried has not ended.
create function ended_records(p_kind text, p_before timestamptz)
returns table (r_owner text, r_stream text, r_version integer, r_time timestamptz)
language sql stable as $$
    select e.run_id, e.stream, e.version, e.time from events e join streams s on s.stream = e.stream
    where e.type = any (case p_kind
                        when 'evaluations' then array['rl.evaluation.completed']
                        when 'verifications' then array['rl.verification.completed']
                        when 'hub_pushes' then array['rl.hub-push.pushed', 'rl.hub-push.failed'] end)
      and is_record(e.type) and e.time < p_before and s.version = e.version
      and (p_kind <> 'evaluations' or e.data ->> 'run' is null)
      and not exists (select from effects f where f.run_id = e.run_id)
$$;

-- Old events in the middle of a stream that a later event makes superfluous: deliveries, the statuses of a commit
-- before its newest one, and deployments before those that are served. Without them the stream folds into the same
-- state, and the newest event of every stream stays.
create function superseded_events(p_kind text, p_before timestamptz)
returns table (r_xid xid8, r_position bigint, r_id uuid, r_stream text, r_version integer, r_run text)
language sql stable as $$
    select e.xid, e.position, e.id, e.stream, e.version,
           coalesce(e.data -> 'served' ->> 'run', e.data ->> 'run')
    from events e join streams s on s.stream = e.stream
    where e.type = any (case p_kind
        when 'deliveries' then array['rl.workspace.push-received', 'rl.workspace.hook-pinged',
                                     'rl.workspace.refs-check-requested']
        when 'statuses' then array['rl.status.decided', 'rl.status.posted']
        when 'deployments' then array['rl.model.deploy-requested', 'rl.model.deployed', 'rl.model.deploy-failed',
                                      'rl.model.deploy-skipped', 'rl.model.undeploy-requested',
                                      'rl.model.undeployed'] end)
      and is_record(e.type) and e.time < p_before and e.version < s.version
      and (p_kind <> 'statuses' or exists (
          select from events n
          where n.stream = e.stream and n.version > e.version and n.type = 'rl.status.decided'))
      and (p_kind <> 'deployments' or exists (
          select from events n
          where n.stream = e.stream and n.version > e.version
            and n.type in ('rl.model.deployed', 'rl.model.undeployed')
            and n.data ->> 'deployment' = e.data ->> 'deployment'))
      and (e.type not in ('rl.model.deployed', 'rl.model.deploy-requested') or exists (
          -- A name that serves nothing still shows what it served last, and who asked last.
          select from events n
          where n.stream = e.stream and n.version > e.version and n.type = e.type
            and n.data ->> 'deployment' = e.data ->> 'deployment'))
$$;

-- How many records of each kind p_kinds can be removed that are older than p_before.
create function count_records(p_kinds text[], p_before timestamptz)
returns table (r_kind text, r_count bigint) language sql stable as $$
    select k.kind, (select count(*) from ended_records(k.kind, p_before))
                 + (select count(*) from superseded_events(k.kind, p_before))
    from unnest(p_kinds) as k (kind)
$$;

-- Remove some records of a kind that are older than p_before: one that is removed whole, or p_most events. With
-- p_owner, only that one. Returns how many records were removed. Rows of the read model go too: they would not come
-- back when it is made again.
create function remove_records(p_kind text, p_before timestamptz, p_owner text, p_most integer)
returns bigint language plpgsql as $$
declare
    record_owner text;
    last record;
    removed bigint := 0;
begin
    select r.r_owner into record_owner
    from ended_records(p_kind, p_before) r join streams s on s.stream = r.r_stream and s.version = r.r_version
    where p_owner is null or r.r_owner = p_owner
    order by r.r_time limit 1 for update of s skip locked;
    if found then
        select e.xid, e.position into last from events e where e.run_id = record_owner
        order by e.xid desc, e.position desc limit 1;
        perform begin_removal(last.xid, last.position);
        insert into discards (sha256)
            select distinct m[1] from events e, regexp_matches(e.data::text, '"row:([0-9a-f]{64})"', 'g') m
            where e.run_id = record_owner and e.stream not like 'dead-letter-%'
            on conflict (sha256) do update set at = clock_timestamp();
        -- The log of a run has lines about its pushes.
        delete from log_lines l using events e
        where e.run_id = record_owner and l.run in (record_owner, e.data -> 'push' ->> 'run')
          and l.xid = e.xid::text::bigint and l.position = e.position;
        with gone as (
            delete from events e where e.run_id = record_owner and e.stream not like 'dead-letter-%'
            returning e.stream
        ), snapped as (
            delete from snapshots s where s.stream in (select g.stream from gone g)
        )
        delete from streams s where s.stream in (select g.stream from gone g);
        insert into removals (owner) values (record_owner)
            on conflict (owner) do update set at = clock_timestamp();
        delete from run_gates g where g.run_id = record_owner;
        delete from names n where n.kind = 'evaluation' and n.id = record_owner;
        delete from evaluations v where v.evaluation = record_owner;
        delete from graded_groups g where g.owner = record_owner;
        delete from metric_points m where m.run = record_owner;
        delete from skipped_events k where k.run = record_owner;
        delete from hub_pushes h where h.push = record_owner;
        return 1;
    end if;
    create temporary table old on commit drop as
        select * from superseded_events(p_kind, p_before)
        where p_owner is null order by r_xid, r_position limit p_most;
    select o.r_xid, o.r_position into last from old o order by o.r_xid desc, o.r_position desc limit 1;
    if found then
        perform begin_removal(last.r_xid, last.r_position);
        insert into trimmed_streams as t (stream, version)
            select o.r_stream, max(o.r_version) from old o group by o.r_stream
            on conflict (stream) do update set version = greatest(t.version, excluded.version);
        delete from deliveries d using old o where d.event = o.r_id::text;
        delete from log_lines l using old o
        where l.run = o.r_run and l.xid = o.r_xid::text::bigint and l.position = o.r_position;
        delete from events e using old o where e.xid = o.r_xid and e.position = o.r_position;
        get diagnostics removed = row_count;
    end if;
    drop table old;
    return removed;
end $$;
-- A run that is deleted takes its pushes to a hub and its verifications along.
create or replace function remove_run(
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
    if p_whole then
        owners := owners || array(select h.push from hub_pushes h where h.run = p_run) || array(
            select e.run_id from events e
            where e.type = 'rl.verification.completed' and is_record(e.type) and e.data ->> 'run' = p_run);
    end if;
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

-- A caller needs only the role of processes, which begin_removal asks for.
do $$
begin
    execute format('alter function remove_run(text, boolean, bigint, uuid, text, integer, text, uuid)'
                   ' security definer set search_path = %1$I, pg_temp', current_schema());
    execute format('alter function remove_records(text, timestamptz, text, integer)'
                   ' security definer set search_path = %1$I, pg_temp', current_schema());
end $$;

select grant_processes();
