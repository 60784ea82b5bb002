-- Records are removed by pages, each found in an index after the one before, so that the time grows with their
-- number. Redriven dead letters, told alerts, rejected uploads and the days of usage can go, too.

-- The types of events that records end with, or consist of.
drop index events_records;
create or replace function is_record(p_type text) returns boolean language sql immutable as $$
    select p_type in (
        'rl.evaluation.completed', 'rl.verification.completed', 'rl.hub-push.pushed', 'rl.hub-push.failed',
        'rl.status.decided', 'rl.status.posted',
        'rl.workspace.push-received', 'rl.workspace.hook-pinged', 'rl.workspace.refs-check-requested',
        'rl.model.deploy-requested', 'rl.model.deployed', 'rl.model.deploy-failed',
        'rl.model.deploy-skipped', 'rl.model.undeploy-requested', 'rl.model.undeployed',
        'rl.dead-letter.redriven',
        'rl.workspace.refs-requested', 'rl.workspace.refs-listed', 'rl.workspace.refs-moved',
        'rl.workspace.pushed', 'rl.workspace.packages-chosen', 'rl.workspace.synced', 'rl.workspace.rejected',
        'rl.trigger.push-examined', 'rl.trigger.skipped')
$$;
create index events_records on events (type, time, position) where is_record(type);
-- What became of each name that was deployed. All deployments have one stream.
create index events_deployed on events ((data ->> 'deployment'), type, version)
    where type in ('rl.model.deployed', 'rl.model.undeployed', 'rl.model.deploy-requested');
create index names_by_id on names (kind, id);
create index alerts_told on alerts (coalesce(sent_at, created_at))
    where channel <> '' and (sent_at is not null or due_at = 'infinity');
create index inference_usage_by_day on inference_usage (day);

-- The events by which old records of a kind are found.
create function record_types(p_kind text) returns text[] language sql immutable as $$
    select case p_kind
        when 'evaluations' then array['rl.evaluation.completed']
        when 'verifications' then array['rl.verification.completed']
        when 'hub_pushes' then array['rl.hub-push.pushed', 'rl.hub-push.failed']
        when 'deliveries' then array['rl.workspace.push-received', 'rl.workspace.hook-pinged',
                                     'rl.workspace.refs-check-requested']
        when 'statuses' then array['rl.status.decided', 'rl.status.posted']
        when 'deployments' then array['rl.model.deploy-requested', 'rl.model.deployed', 'rl.model.deploy-failed',
                                      'rl.model.deploy-skipped', 'rl.model.undeploy-requested',
                                      'rl.model.undeployed']
        when 'dead_letters' then array['rl.dead-letter.redriven']
        else array[]::text[] end
$$;

-- Whether the record that is found by this event may go. Evaluations, verifications and pushes to a hub go whole,
-- once they have ended: a validation belongs to its run and goes with it, what was retried has not ended, and a
-- request to stop that came too late changes nothing. Of other streams only events go that a later one makes
-- superfluous: deliveries, the statuses of a commit before its newest one, and deployments before those that are
-- served. Without them the stream folds into the same state. The newest event of such a stream stays.
create function may_remove(p_kind text, p_event events) returns boolean language plpgsql stable as $$
begin
    if p_kind in ('evaluations', 'verifications', 'hub_pushes') then
        return (p_kind <> 'evaluations' or p_event.data ->> 'run' is null)
            and not exists (
                select from events n where n.stream = p_event.stream and n.version > p_event.version
                  and n.type not in ('rl.evaluation.stop-requested', 'rl.hub-push.cancel-requested'))
            and not exists (select from effects f where f.run_id = p_event.run_id);
    end if;
    if not exists (select from streams s where s.stream = p_event.stream and s.version > p_event.version) then
        return false;
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

-- Remove everything of a record that goes whole; returns how many events that were.
create function remove_owner(p_owner text) returns bigint language plpgsql as $$
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
    -- The log of a run has lines about its pushes.
    delete from log_lines l using events e
    where e.run_id = p_owner and l.run in (p_owner, e.data -> 'push' ->> 'run')
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
    delete from hub_pushes h where h.push = p_owner;
    return removed;
end $$;
revoke execute on function remove_owner(text) from public;

-- Remove one event of a stream that goes on, and the rows that follow from it.
create function remove_event(p_event events) returns void language plpgsql as $$
begin
    perform begin_removal(p_event.xid, p_event.position);
    insert into discards (sha256)
        select distinct m[1] from regexp_matches(p_event.data::text, '"row:([0-9a-f]{64})"', 'g') m
        on conflict (sha256) do update set at = clock_timestamp();
    delete from deliveries d
    where d.workspace = p_event.data ->> 'workspace' and d.event = p_event.id::text;
    delete from log_lines l
    where l.run in (p_event.run_id, p_event.data -> 'served' ->> 'run', p_event.data ->> 'run')
      and l.xid = p_event.xid::text::bigint and l.position = p_event.position;
    delete from events e where e.xid = p_event.xid and e.position = p_event.position;
end $$;
revoke execute on function remove_event(events) from public;

-- Remove the record that is found by this event, unless another session removes it at this moment, or it may not go.
-- Returns how many events went.
create function remove_record(p_kind text, p_event events) returns bigint language plpgsql as $$
declare
    letter events;
begin
    if p_kind in ('evaluations', 'verifications', 'hub_pushes') then
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
    if p_kind <> 'dead_letters' then
        return 1;
    end if;
    select e.* into letter from dead_letters d join events e
        on e.stream = p_event.stream and e.version = d.version
    where d.letter = p_event.data ->> 'letter';
    if found then
        perform remove_event(letter);
        delete from dead_letters d where d.letter = p_event.data ->> 'letter';
    end if;
    return 2;
end $$;
revoke execute on function remove_record(text, events) from public;

-- Look at the next p_most events of a type after (p_time, p_position), and remove the records of a kind that are found
-- by them, older than p_before, until p_most events are gone. Returns how many records were removed and where it
-- ended; null when no such event was left. Rows of the read model go too: they would not come back when it is made
-- again. Sessions that do this at the same time skip each other's records.
create function remove_page(
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
    if p_kind not in ('evaluations', 'verifications', 'hub_pushes') then
        insert into trimmed_streams as t (stream, version)
            select c.stream, max(c.version) from unnest(streams_cut, versions_cut) as c (stream, version)
            group by c.stream order by c.stream
            on conflict (stream) do update set version = greatest(t.version, excluded.version);
    end if;
    return next;
end $$;

-- Remove one evaluation that has ended, whatever its age. Returns whether it was there.
create function remove_evaluation(p_evaluation text) returns boolean language plpgsql
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    ended events;
begin
    select e.* into ended from events e
    where e.stream = 'eval-' || p_evaluation and e.type = 'rl.evaluation.completed'
    order by e.version desc limit 1;
    return found and remove_record('evaluations', ended) > 0;
end $$;

-- Whether an upload was rejected before p_before, or never completed. One that became a dataset goes with it.
create function is_old_upload(p_upload dataset_uploads, p_before timestamptz) returns boolean
language sql stable as $$
    select coalesce(p_upload.rejected_at, p_upload.created_at) < p_before
       and (p_upload.status = 'error' or p_upload.created_at < clock_timestamp() - interval '1 day')
       and not exists (select from streams s where s.stream = 'dataset-' || p_upload.id and s.version > 0)
$$;

-- Records that are rows and no events: alerts that were told or given up, uploads that became no dataset, and the use
-- of models by day. The last is not lost: old days are added up. What was told about a run stays marked with the run,
-- so that it is not told again. p_most rows at once; returns how many.
create function remove_old_rows(p_kind text, p_before timestamptz, p_most integer) returns bigint language plpgsql as $$
declare
    removed bigint := 0;
begin
    if p_kind = 'alerts' then
        delete from alerts a where a.ctid = any (array(
            select o.ctid from alerts o
            where o.channel <> '' and (o.sent_at is not null or o.due_at = 'infinity')
              and coalesce(o.sent_at, o.created_at) < p_before
            order by coalesce(o.sent_at, o.created_at) limit p_most for update skip locked));
        get diagnostics removed = row_count;
    elsif p_kind = 'uploads' then
        delete from dataset_uploads u where u.id in (
            select o.id from dataset_uploads o where is_old_upload(o, p_before)
            limit p_most for update skip locked);
        get diagnostics removed = row_count;
    elsif p_kind = 'usage' then
        with old as materialized (
            delete from inference_usage u where u.ctid = any (array(
                select o.ctid from inference_usage o
                where o.day > '-infinity' and o.day < (p_before at time zone 'utc')::date
                order by o.day limit p_most for update skip locked))
            returning u.*
        ), added as (
            insert into inference_usage as u
                (token, model, day, requests, prompt_tokens, completion_tokens, last_at)
            select o.token, o.model, '-infinity', sum(o.requests), sum(o.prompt_tokens), sum(o.completion_tokens),
                   max(o.last_at)
            from old o group by o.token, o.model order by o.token, o.model
            on conflict (token, model, day) do update set requests = u.requests + excluded.requests,
                prompt_tokens = u.prompt_tokens + excluded.prompt_tokens,
                completion_tokens = u.completion_tokens + excluded.completion_tokens,
                last_at = greatest(u.last_at, excluded.last_at)
        )
        select count(*) into removed from old;
    end if;
    return removed;
end $$;

-- How many records of each kind p_kinds can be removed that are older than p_before.
create or replace function count_records(p_kinds text[], p_before timestamptz)
returns table (r_kind text, r_count bigint) language sql stable
set enable_seqscan = off set enable_bitmapscan = off as $$
    select k.kind, (
        select count(*) from unnest(record_types(k.kind)) as t (type)
        join events e on e.type = t.type and is_record(e.type) and e.time < p_before
        where may_remove(k.kind, e)
    ) + case k.kind
        when 'alerts' then (
            select count(*) from alerts o
            where o.channel <> '' and (o.sent_at is not null or o.due_at = 'infinity')
              and coalesce(o.sent_at, o.created_at) < p_before)
        when 'uploads' then (
            select count(*) from dataset_uploads o where is_old_upload(o, p_before))
        when 'usage' then (
            select count(*) from inference_usage o
            where o.day > '-infinity' and o.day < (p_before at time zone 'utc')::date)
        else 0 end
    from unnest(p_kinds) as k (kind)
$$;

-- The same for processes of the version before, which still run during an upgrade: each call begins again.
create or replace function remove_records(p_kind text, p_before timestamptz, p_owner text, p_most integer)
returns bigint language plpgsql as $$
declare
    found_type text;
    removed bigint;
    upto timestamptz;
    place bigint;
begin
    if p_owner is not null then
        return remove_evaluation(p_owner)::integer;
    end if;
    foreach found_type in array record_types(p_kind) loop
        upto := '-infinity';
        place := 0;
        while upto is not null loop
            select r.r_removed, r.r_time, r.r_position into removed, upto, place
            from remove_page(p_kind, found_type, p_before, upto, place, p_most) r;
            if removed > 0 then
                return removed;
            end if;
        end loop;
    end loop;
    return 0;
end $$;
drop function superseded_events(text, timestamptz);
drop function ended_records(text, timestamptz);

-- A caller needs only the role of processes, which begin_removal asks for.
do $$
begin
    execute format('alter function remove_page(text, text, timestamptz, timestamptz, bigint, integer)'
                   ' security definer set search_path = %1$I, pg_temp', current_schema());
    execute format('alter function remove_evaluation(text)'
                   ' security definer set search_path = %1$I, pg_temp', current_schema());
    execute format('alter function remove_records(text, timestamptz, text, integer)'
                   ' security definer set search_path = %1$I, pg_temp', current_schema());
end $$;

select grant_processes();
