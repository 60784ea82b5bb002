-- A push is a push to a repository. What asks for a commit is a request: `rl.workspace.commit-requested`. Events of the
-- type before, `rl.workspace.pushed`, stay as they are, because events are facts, and are read as such requests.

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
        'rl.workspace.commit-requested', 'rl.workspace.packages-chosen', 'rl.workspace.synced',
        'rl.workspace.rejected', 'rl.workspace.pushed',
        'rl.trigger.push-examined', 'rl.trigger.skipped')
$$;
create index events_records on events (type, time, position) where is_record(type);

drop index events_refs;
create index events_refs on events (stream, type, version)
    where type in ('rl.workspace.refs-requested', 'rl.workspace.refs-listed', 'rl.workspace.commit-requested',
                   'rl.workspace.pushed');

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
        when 'syncs' then array['rl.workspace.commit-requested', 'rl.workspace.pushed',
                                'rl.workspace.packages-chosen', 'rl.workspace.synced', 'rl.workspace.rejected']
        else array[]::text[] end
$$;

create or replace function may_remove_of_repository(p_kind text, p_event events) returns boolean language plpgsql stable as $$
declare
    requester text := p_event.data ->> 'requester';
    -- Earlier releases wrote requests of commits as `rl.workspace.pushed`.
    requests constant text[] := array['rl.workspace.commit-requested', 'rl.workspace.pushed'];
    alike text[] := case when p_event.type = any (requests) then requests else array[p_event.type] end;
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
    if p_event.type = any (array['rl.workspace.refs-requested', 'rl.workspace.refs-listed'] || requests)
       and not exists (
            select from events n
            where n.stream = p_event.stream and n.version > p_event.version and n.type = any (alike)
              and n.type in ('rl.workspace.refs-requested', 'rl.workspace.refs-listed',
                             'rl.workspace.commit-requested', 'rl.workspace.pushed')
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
    if p_event.type = any (requests) and not exists (
            select from events n
            where n.stream = p_event.stream and n.version < p_event.version
              and n.type in ('rl.workspace.commit-requested', 'rl.workspace.pushed')) then
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
