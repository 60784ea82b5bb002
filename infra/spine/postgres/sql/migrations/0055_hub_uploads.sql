-- A push is one to a repository, and a checkpoint is uploaded to a model hub. Events of the types before stay as they
-- are, because events are facts, and are read as today's. What waits to be uploaded is no fact, and gets its new name.

alter table hub_pushes rename to hub_uploads;
alter table hub_uploads rename column push to upload;
alter index hub_pushes_pkey rename to hub_uploads_pkey;
alter index hub_pushes_by_run rename to hub_uploads_by_run;
update hub_uploads set status = 'uploaded' where status = 'pushed';

update effects set type = 'UploadCheckpoint', data = json_build_object('upload',
    (data -> 'push')::jsonb - 'push' || jsonb_build_object('upload', data -> 'push' -> 'push'))
where type = 'PushCheckpoint';

-- From Postgres 18 on, "not null" is a constraint whose name comes from the table and the column.
do $$
declare
    one record;
begin
    for one in
        select c.conname as old, format('hub_uploads_%s_not_null', a.attname) as new
        from pg_constraint c join pg_attribute a on a.attrelid = c.conrelid and a.attnum = c.conkey[1]
        where c.contype = 'n' and c.conrelid = 'hub_uploads'::regclass
    loop
        if one.old <> one.new then
            execute format('alter table hub_uploads rename constraint %I to %I', one.old, one.new);
        end if;
    end loop;
end $$;

drop index events_records;
create or replace function is_record(p_type text) returns boolean language sql immutable as $$
    select p_type in (
        'rl.evaluation.completed', 'rl.verification.completed',
        'rl.hub-upload.uploaded', 'rl.hub-upload.failed', 'rl.hub-push.pushed', 'rl.hub-push.failed',
        'rl.status.decided', 'rl.status.posted',
        'rl.workspace.push-received', 'rl.workspace.hook-pinged', 'rl.workspace.refs-check-requested',
        'rl.model.deploy-requested', 'rl.model.deployed', 'rl.model.deploy-failed',
        'rl.model.deploy-skipped', 'rl.model.undeploy-requested', 'rl.model.undeployed',
        'rl.dead-letter.redriven',
        'rl.workspace.refs-requested', 'rl.workspace.refs-listed', 'rl.workspace.refs-moved',
        'rl.workspace.commit-requested', 'rl.workspace.packages-chosen', 'rl.workspace.synced',
        'rl.workspace.rejected', 'rl.workspace.pushed',
        'rl.trigger.push-examined', 'rl.trigger.skipped')
$$;
create index events_records on events (type, time, position) where is_record(type);

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
        owners := owners || array(select h.upload from hub_uploads h where h.run = p_run) || array(
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

create or replace function record_types(p_kind text) returns text[] language sql immutable as $$
    select case p_kind
        when 'evaluations' then array['rl.evaluation.completed']
        when 'verifications' then array['rl.verification.completed']
        when 'hub_uploads' then array['rl.hub-upload.uploaded', 'rl.hub-upload.failed',
                                      'rl.hub-push.pushed', 'rl.hub-push.failed']
        when 'deliveries' then array['rl.workspace.push-received', 'rl.workspace.hook-pinged',
                                     'rl.workspace.refs-check-requested']
        when 'statuses' then array['rl.status.decided', 'rl.status.posted']
        when 'deployments' then array['rl.model.deploy-requested', 'rl.model.deployed', 'rl.model.deploy-failed',
                                      'rl.model.deploy-skipped', 'rl.model.undeploy-requested',
                                      'rl.model.undeployed']
        when 'dead_letters' then array['rl.dead-letter.redriven']
        when 'pushes' then array['rl.workspace.refs-moved']
        when 'ref_checks' then array['rl.workspace.refs-requested', 'rl.workspace.refs-listed']
        when 'syncs' then array['rl.workspace.commit-requested', 'rl.workspace.pushed',
                                'rl.workspace.packages-chosen', 'rl.workspace.synced', 'rl.workspace.rejected']
        else array[]::text[] end
$$;

create or replace function may_remove(p_kind text, p_event events) returns boolean language plpgsql stable as $$
begin
    if p_kind in ('evaluations', 'verifications', 'hub_uploads') then
        return (p_kind <> 'evaluations' or p_event.data ->> 'run' is null)
            and not exists (
                select from events n where n.stream = p_event.stream and n.version > p_event.version
                  and n.type not in ('rl.evaluation.stop-requested', 'rl.hub-upload.cancel-requested',
                                     'rl.hub-push.cancel-requested'))
            and not exists (select from effects f where f.run_id = p_event.run_id);
    end if;
    if not exists (select from streams s where s.stream = p_event.stream and s.version > p_event.version) then
        return false;
    end if;
    if p_kind in ('pushes', 'ref_checks', 'syncs') then
        return may_remove_of_repository(p_kind, p_event);
    end if;
    if p_kind = 'statuses' then
        return exists (
            select from events n where n.stream = p_event.stream and n.version > p_event.version
              and n.type = 'rl.status.decided');
    end if;
    if p_kind = 'deployments' then
        return exists (
                select from events n
                where n.type in ('rl.model.deployed', 'rl.model.undeployed')
                  and n.data ->> 'deployment' = p_event.data ->> 'deployment' and n.version > p_event.version)
            and (p_event.type not in ('rl.model.deployed', 'rl.model.deploy-requested') or exists (
                -- A name that serves nothing still shows what it served last, and who asked last.
                select from events n
                where n.type in ('rl.model.deployed', 'rl.model.deploy-requested') and n.type = p_event.type
                  and n.data ->> 'deployment' = p_event.data ->> 'deployment' and n.version > p_event.version));
    end if;
    return true;
end $$;

create or replace function remove_owner(p_owner text) returns bigint language plpgsql as $$
declare
    last record;
    removed bigint;
begin
    select e.xid, e.position into last from events e where e.run_id = p_owner
    order by e.xid desc, e.position desc limit 1;
    perform begin_removal(last.xid, last.position);
    insert into discards (sha256)
        select distinct m[1] from events e, regexp_matches(e.data::text, '"row:([0-9a-f]{64})"', 'g') m
        where e.run_id = p_owner and e.stream not like 'dead-letter-%'
        on conflict (sha256) do update set at = clock_timestamp();
    -- The log of a run has lines about its uploads to a hub, which earlier releases called pushes.
    delete from log_lines l using events e
    where e.run_id = p_owner and l.run in (p_owner, e.data -> 'upload' ->> 'run', e.data -> 'push' ->> 'run')
      and l.xid = e.xid::text::bigint and l.position = e.position;
    with gone as (
        delete from events e where e.run_id = p_owner and e.stream not like 'dead-letter-%'
        returning e.stream
    ), snapped as (
        delete from snapshots s where s.stream = any (array(select distinct g.stream from gone g))
    ), headless as (
        delete from streams s where s.stream = any (array(select distinct g.stream from gone g))
    )
    select count(*) into removed from gone;
    insert into removals (owner) values (p_owner)
        on conflict (owner) do update set at = clock_timestamp();
    delete from run_gates g where g.run_id = p_owner;
    delete from names n where n.kind = 'evaluation' and n.id = p_owner;
    delete from evaluations v where v.evaluation = p_owner;
    delete from graded_groups g where g.owner = p_owner;
    delete from metric_points m where m.run = p_owner;
    delete from skipped_events k where k.run = p_owner;
    delete from hub_uploads h where h.upload = p_owner;
    return removed;
end $$;

create or replace function remove_record(p_kind text, p_event events) returns bigint language plpgsql as $$
declare
    letter events;
    move record;
    removed bigint := 1;
begin
    if p_kind in ('evaluations', 'verifications', 'hub_uploads') then
        perform from streams s where s.stream = p_event.stream for update skip locked;
        -- Asked again, because it may have changed until it was locked.
        if not found or not may_remove(p_kind, p_event) then
            return 0;
        end if;
        return remove_owner(p_event.run_id);
    end if;
    perform from events e where e.xid = p_event.xid and e.position = p_event.position for update skip locked;
    if not found then
        return 0;
    end if;
    perform remove_event(p_event);
    if p_kind = 'dead_letters' then
        select e.* into letter from dead_letters d join events e
            on e.stream = p_event.stream and e.version = d.version
        where d.letter = p_event.data ->> 'letter';
        if found then
            perform remove_event(letter);
            delete from dead_letters d where d.letter = p_event.data ->> 'letter';
            removed := removed + 1;
        end if;
    elsif p_kind = 'pushes' then
        for move in
            select m.move ->> 'number' as number from json_array_elements(p_event.data -> 'moves') as m (move)
        loop
            removed := removed + remove_push(p_event.run_id, move.number);
            delete from pushes p where p.push = p_event.run_id || '.' || move.number;
        end loop;
    end if;
    return removed;
end $$;

create or replace function remove_page(
    p_kind text, p_type text, p_before timestamptz, p_time timestamptz, p_position bigint, p_most integer
) returns table (r_removed bigint, r_time timestamptz, r_position bigint) language plpgsql
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    one events;
    went bigint;
    events_gone bigint := 0;
    streams_cut text[] := '{}';
    versions_cut integer[] := '{}';
begin
    r_removed := 0;
    for one in
        select e.* from events e
        where e.type = p_type and is_record(e.type) and e.time < p_before
          and (e.time, e.position) > (p_time, p_position)
        order by e.time, e.position limit p_most
    loop
        r_time := one.time;
        r_position := one.position;
        continue when not may_remove(p_kind, one);
        went := remove_record(p_kind, one);
        continue when went = 0;
        r_removed := r_removed + 1;
        events_gone := events_gone + went;
        streams_cut := streams_cut || one.stream;
        versions_cut := versions_cut || one.version;
        exit when events_gone >= p_most;
    end loop;
    if p_kind not in ('evaluations', 'verifications', 'hub_uploads') then
        insert into trimmed_streams as t (stream, version)
            select c.stream, max(c.version) from unnest(streams_cut, versions_cut) as c (stream, version)
            group by c.stream order by c.stream
            on conflict (stream) do update set version = greatest(t.version, excluded.version);
    end if;
    return next;
end $$;

create or replace function grant_processes() returns void language plpgsql as $$
declare
    t name;
    rights text;
begin
    if not exists (select from pg_roles where rolname = 'headrace_worker') then
        begin
            create role headrace_worker nologin;
        exception
            when duplicate_object or unique_violation then null;
            when insufficient_privilege then
                raise exception '% may not create roles: let an administrator run'
                    ' "create role headrace_worker nologin; grant headrace_worker to %"',
                    current_user, current_user;
        end;
    end if;
    if not (select rolsuper from pg_roles where rolname = current_user)
       and not pg_has_role(current_user, 'headrace_worker', 'usage') then
        execute format('grant headrace_worker to %I', current_user);
    end if;
    execute format('grant usage on schema %I to headrace_worker', current_schema());
    for t in select tablename from pg_tables where schemaname = current_schema() loop
        rights := case
            when t = 'events' then 'select, insert'
            when t = 'artifacts' then 'select, insert, delete'
            when t in ('migrations', 'cluster') then 'select'
            -- What follows from the log alone is emptied as a whole before it is projected again.
            when t in ('runs', 'metric_points', 'checkpoints', 'graded_groups', 'log_lines',
                       'datasets', 'workspaces', 'evaluations', 'dead_letters',
                       'deliveries', 'pushes', 'triggered_runs', 'deployments', 'hub_uploads')
                then 'select, insert, update, delete, truncate'
            else 'select, insert, update, delete'
        end;
        execute format('revoke all on %I from headrace_worker', t);
        execute format('grant %s on %I to headrace_worker', rights, t);
    end loop;
    execute format('alter default privileges in schema %I grant select, insert, update, delete'
                   ' on tables to headrace_worker', current_schema());
end $$;

-- A caller needs only the role of processes, which begin_removal asks for.
do $$
begin
    execute format('alter function remove_run(text, boolean, bigint, uuid, text, integer, text, uuid)'
                   ' security definer set search_path = %I, pg_temp', current_schema());
    execute format('alter function remove_page(text, text, timestamptz, timestamptz, bigint, integer)'
                   ' security definer set search_path = %I, pg_temp', current_schema());
end $$;
