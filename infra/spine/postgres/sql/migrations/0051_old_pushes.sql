-- The history of a repository can go, too: old pushes, listings of refs, and syncs of commits.

-- What became of a push, by its number, and of a run that it triggered, by its id.
create index events_triggers on events (stream, (coalesce(data ->> 'run', data -> 'push' ->> 'number')), version)
    where type like 'rl.trigger.%';
create index events_refs on events (stream, type, version)
    where type in ('rl.workspace.refs-requested', 'rl.workspace.refs-listed', 'rl.workspace.pushed');
-- The syncs that look at a whole commit, and not only at what a run needs.
create index events_synced on events (stream, version)
    where type = 'rl.workspace.synced' and data ->> 'requester' is null;
create index pushes_by_ref on pushes (workspace, ref, number) where after is not null;

create or replace function record_types(p_kind text) returns text[] language sql immutable as $$
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
        when 'pushes' then array['rl.workspace.refs-moved']
        when 'ref_checks' then array['rl.workspace.refs-requested', 'rl.workspace.refs-listed']
        when 'syncs' then array['rl.workspace.pushed', 'rl.workspace.packages-chosen', 'rl.workspace.synced',
                                'rl.workspace.rejected']
        else array[]::text[] end
$$;

-- Whether a run or an evaluation, by its stream, was deleted. An archived one still exists.
create function is_deleted(p_stream text) returns boolean language sql stable as $$
    select not exists (
        select from events e where e.stream = p_stream and e.version = 1 and e.type <> 'rl.run.deleted')
$$;

-- Whether nothing needs to know any more what became of a push: it was examined, it does not count for today, and it
-- triggered no run but those that were skipped, refused or deleted. A run that superseded another one stays as long as
-- that one does, because it ended the other's turn. The newest event of the stream stays.
create function push_is_over(p_workspace text, p_number text) returns boolean language plpgsql stable as $$
declare
    own text := 'trigger-' || p_workspace;
    head integer := (select s.version from streams s where s.stream = own);
    examined events;
    one record;
begin
    select e.* into examined from events e
    where e.stream = own and e.type like 'rl.trigger.%'
      and coalesce(e.data ->> 'run', e.data -> 'push' ->> 'number') = p_number;
    if not found or examined.version = head or examined.data ->> 'day' = (
        select n.data ->> 'day' from events n
        where n.stream = own and n.type = 'rl.trigger.push-examined' and n.data ->> 'day' <> ''
        order by n.version desc limit 1) then
        return false;
    end if;
    for one in
        select t.run, t.outcome from triggered_runs t where t.push = p_workspace || '.' || p_number
    loop
        if one.outcome not in ('skipped', 'refused') and not (
                one.outcome = 'submitted' and is_deleted('run-' || one.run)) then
            return false;
        end if;
        if exists (
            select from events e
            where e.stream = own and e.type like 'rl.trigger.%'
              and coalesce(e.data ->> 'run', e.data -> 'push' ->> 'number') = one.run
              and (e.version = head or e.type = 'rl.trigger.fired' and exists (
                  select from json_array_elements_text(e.data -> 'supersedes') as s (run)
                  join events o on o.stream = own and o.type like 'rl.trigger.%'
                    and coalesce(o.data ->> 'run', o.data -> 'push' ->> 'number') = s.run))
        ) then
            return false;
        end if;
    end loop;
    return true;
end $$;

-- Whether an event of a repository may go. Without it the workspace folds into the same state, but for the numbers of
-- messages that were answered: those were read by all, and are not delivered again. Of each ref the last commit stays,
-- and that it is gone. The first push of a workspace made it. What a run or evaluation asked for goes when it is
-- deleted, and the rest when a later event says the same.
create function may_remove_of_repository(p_kind text, p_event events) returns boolean language plpgsql stable as $$
declare
    requester text := p_event.data ->> 'requester';
begin
    if exists (select from effects f where f.run_id = p_event.run_id) then
        return false;
    end if;
    if p_kind = 'pushes' then
        return not exists (
            select from json_array_elements(p_event.data -> 'moves') as m (move)
            where not exists (
                    select from pushes n
                    where n.workspace = p_event.run_id and n.ref = m.move ->> 'ref'
                      and n.number > (m.move ->> 'number')::bigint and n.after is not null)
               or (not coalesce((p_event.data ->> 'baseline')::boolean, false) and m.move ->> 'after' is not null
                   and not push_is_over(p_event.run_id, m.move ->> 'number')));
    end if;
    if p_event.type in ('rl.workspace.refs-requested', 'rl.workspace.refs-listed', 'rl.workspace.pushed')
       and not exists (
            select from events n
            where n.stream = p_event.stream and n.version > p_event.version and n.type = p_event.type
              and n.type in ('rl.workspace.refs-requested', 'rl.workspace.refs-listed', 'rl.workspace.pushed')
              and (n.data ->> 'round')::bigint is not distinct from greatest(
                      (n.data ->> 'round')::bigint, (p_event.data ->> 'round')::bigint)) then
        return false;
    end if;
    if p_event.type = 'rl.workspace.refs-requested' then
        return exists (
            select from events n
            where n.stream = p_event.stream and n.version > p_event.version
              and n.type = 'rl.workspace.refs-listed'
              and (n.data ->> 'round')::bigint >= (p_event.data ->> 'round')::bigint);
    end if;
    if p_event.type = 'rl.workspace.refs-listed' then
        return p_event.data ->> 'error' is not null or exists (
            select from events n
            where n.stream = p_event.stream and n.version > p_event.version
              and n.type = 'rl.workspace.refs-listed' and n.data ->> 'error' is null
              and (n.data ->> 'digest' is not null or p_event.data ->> 'digest' is null)
              and (n.data ->> 'default_branch' is not null or p_event.data ->> 'default_branch' is null));
    end if;
    if p_event.type = 'rl.workspace.pushed' and not exists (
            select from events n
            where n.stream = p_event.stream and n.version < p_event.version and n.type = 'rl.workspace.pushed') then
        return false;
    end if;
    if requester is not null then
        return is_deleted(requester);
    end if;
    return exists (
        select from events n
        where n.stream = p_event.stream and n.version > p_event.version
          and n.type = 'rl.workspace.synced' and n.data ->> 'requester' is null);
end $$;

create or replace function may_remove(p_kind text, p_event events) returns boolean language plpgsql stable as $$
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

-- Remove one event of a stream that goes on, and the rows that follow from it. The snapshot of a workspace is not a
-- run's, so the collector is told of it.
create or replace function remove_event(p_event events) returns void language plpgsql as $$
begin
    perform begin_removal(p_event.xid, p_event.position);
    insert into discards (sha256)
        select distinct m[1] from regexp_matches(p_event.data::text, '"row:([0-9a-f]{64})"', 'g') m
        on conflict (sha256) do update set at = clock_timestamp();
    if p_event.type = 'rl.workspace.synced'
       and p_event.data -> 'snapshot' ->> 'uri' like '%/runs/' || p_event.run_id || '/%' then
        insert into discarded_blobs (uri) values (p_event.data -> 'snapshot' ->> 'uri')
            on conflict (uri) do update set at = clock_timestamp();
    end if;
    delete from deliveries d
    where d.workspace = p_event.data ->> 'workspace' and d.event = p_event.id::text;
    delete from log_lines l
    where l.run in (p_event.run_id, p_event.data -> 'served' ->> 'run', p_event.data ->> 'run',
                    substr(p_event.data ->> 'requester', strpos(p_event.data ->> 'requester', '-') + 1))
      and l.xid = p_event.xid::text::bigint and l.position = p_event.position;
    delete from events e where e.xid = p_event.xid and e.position = p_event.position;
end $$;

-- Remove what became of a push that is over: what its triggers did, and the statuses of its commit, which nothing
-- follows any more. Returns how many events went.
create function remove_push(p_workspace text, p_number text) returns bigint language plpgsql as $$
declare
    own text := 'trigger-' || p_workspace;
    runs text[] := array(select t.run from triggered_runs t where t.push = p_workspace || '.' || p_number);
    shown text[] := array(select 'status-' || s.subject
                          from unnest(runs || (p_workspace || '.' || p_number)) as s (subject));
    one events;
    cut integer := 0;
    removed bigint := 0;
begin
    for one in
        select e.* from events e
        where e.stream = own and e.type like 'rl.trigger.%'
          and coalesce(e.data ->> 'run', e.data -> 'push' ->> 'number') = any (runs || p_number)
        union all
        select e.* from events e where e.stream = any (shown)
    loop
        perform remove_event(one);
        removed := removed + 1;
        if one.stream = own then
            cut := greatest(cut, one.version);
        end if;
    end loop;
    if cut > 0 then
        insert into trimmed_streams as t (stream, version) values (own, cut)
        on conflict (stream) do update set version = greatest(t.version, excluded.version);
    end if;
    delete from streams s where s.stream = any (shown);
    delete from snapshots s where s.stream = any (shown);
    delete from trimmed_streams t where t.stream = any (shown);
    delete from triggered_runs t where t.push = p_workspace || '.' || p_number;
    return removed;
end $$;
revoke execute on function remove_push(text, text) from public;

create or replace function remove_record(p_kind text, p_event events) returns bigint language plpgsql as $$
declare
    letter events;
    move record;
    removed bigint := 1;
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

select grant_processes();
