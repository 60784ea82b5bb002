-- The name of a deployment is unique in its workspace, no longer in the installation. A deployment from before belongs
-- to the workspace of its run.

-- Whose name an event about a deployment means: a workspace, '' for none, null for an event of an earlier release that
-- says only a name.
create function deployment_scope(p_data json) returns text language sql immutable as $$
    select case
        when p_data -> 'served' is not null then coalesce(p_data -> 'served' ->> 'workspace', '')
        else p_data ->> 'scope' end
$$;

-- == Deployments ==========================================================================================

-- The request whose checkpoint is being loaded.
alter table deployments add column request text not null default '';

-- A name that another workspace deployed after it was free belonged to that one.
update deployments d set workspace = d.served::json ->> 'workspace'
where d.served is not null and d.workspace is distinct from d.served::json ->> 'workspace';

alter table deployments add column key text not null
    generated always as (coalesce(workspace || '/', '') || deployment) stored;
alter table deployments drop constraint deployments_pkey;
alter table deployments add primary key (key);
create index deployments_by_name on deployments (deployment);

-- Those who had a name before see what they served last.
insert into deployments (deployment, workspace, created_at)
select e.data ->> 'deployment', nullif(deployment_scope(e.data), ''), min(e.time)
from events e where e.stream = 'model-deployments' and e.type in ('rl.model.deploy-requested', 'rl.model.deployed')
group by 1, 2
on conflict do nothing;

update deployments d set number = (e.data ->> 'number')::bigint, served = e.data ->> 'served',
    deployed_at = e.time, updated_at = e.time
from (
    select distinct on (o.data ->> 'deployment', deployment_scope(o.data)) o.*
    from events o where o.stream = 'model-deployments' and o.type = 'rl.model.deployed'
    order by o.data ->> 'deployment', deployment_scope(o.data), o.version desc
) e
where e.data ->> 'deployment' = d.deployment and deployment_scope(e.data) = coalesce(d.workspace, '')
  and d.served is null;

-- What each of them asked for last, and what became of that.
update deployments d set
    pending = case when a.type is null
        then (r.data -> 'served' ->> 'run_name') || '@' || (r.data -> 'served' ->> 'step') else '' end,
    request = case when a.type is null then r.data ->> 'request' else '' end,
    error = case when a.type = 'rl.model.deploy-failed' then a.data ->> 'message' else '' end,
    requested_by = coalesce(r.actor, 'run ' || (r.data -> 'served' ->> 'run_name'))
from (
    select distinct on (o.data ->> 'deployment', deployment_scope(o.data)) o.*
    from events o where o.stream = 'model-deployments' and o.type = 'rl.model.deploy-requested'
    order by o.data ->> 'deployment', deployment_scope(o.data), o.version desc
) r left join lateral (
    select n.type, n.data from events n
    where n.stream = r.stream and n.version > r.version and n.data ->> 'deployment' = r.data ->> 'deployment'
      and (n.type = 'rl.model.undeployed'
           or n.type in ('rl.model.deployed', 'rl.model.deploy-failed', 'rl.model.deploy-skipped')
              and n.data ->> 'request' = r.data ->> 'request')
    order by n.version desc limit 1
) a on true
where r.data ->> 'deployment' = d.deployment and deployment_scope(r.data) = coalesce(d.workspace, '');

alter table deployments enable row level security;
create policy visible_workspaces on deployments using (
    (select shown_workspaces()) is null or workspace = any ((select shown_workspaces())::text[]));

-- == What was used ========================================================================================

-- It is counted as BASE:WORKSPACE/NAME now. What was used of a name that several workspaces had one after the other
-- belongs to the workspace of the API key, or else to the last one that the key sees.
with names as (
    select distinct data ->> 'deployment' as name, data -> 'served' ->> 'base_name' as base from events
    where stream = 'model-deployments' and type = 'rl.model.deployed'
    union
    select deployment, served::json ->> 'base_name' from deployments where served is not null
), places as (
    select u.api_key, u.model, u.day, n.base, n.name, coalesce(k.workspace, (
        select d.workspace from deployments d left join workspace_homes h on h.workspace = d.workspace
        where d.deployment = n.name and d.served is not null
          and (k.organisation is null or coalesce(h.organisation, 'main') = k.organisation)
        order by d.number desc limit 1)) as place
    from inference_usage u join names n on u.model = n.base || ':' || n.name
    left join api_keys k on k.id = u.api_key
)
update inference_usage u set model = p.base || ':' || p.place || '/' || p.name
from places p where p.api_key = u.api_key and p.model = u.model and p.day = u.day and p.place is not null;

-- == What may be removed ==================================================================================

-- Whether an event about a deployment may go, because what came later is all that counts.
create function may_remove_of_deployment(p_event events) returns boolean language plpgsql stable as $$
declare
    place text := deployment_scope(p_event.data);
begin
    if place is null then
        -- An event that says only a name may have ended what any workspace had under it, so it stays as long as
        -- anything before it does.
        return exists (
                select from events n
                where n.type in ('rl.model.deployed', 'rl.model.undeployed') and n.data -> 'scope' is null
                  and n.data ->> 'deployment' = p_event.data ->> 'deployment' and n.version > p_event.version)
            and not exists (
                select from events n
                where n.type in ('rl.model.deployed', 'rl.model.deploy-requested')
                  and n.data ->> 'deployment' = p_event.data ->> 'deployment' and n.version < p_event.version);
    end if;
    return exists (
            select from events n
            where n.type in ('rl.model.deployed', 'rl.model.undeployed')
              and n.data ->> 'deployment' = p_event.data ->> 'deployment' and n.version > p_event.version
              and coalesce(deployment_scope(n.data), place) = place)
        and (p_event.type not in ('rl.model.deployed', 'rl.model.deploy-requested') or exists (
            -- A name that serves nothing still shows what it served last, and who asked last.
            select from events n
            where n.type in ('rl.model.deployed', 'rl.model.deploy-requested') and n.type = p_event.type
              and n.data ->> 'deployment' = p_event.data ->> 'deployment' and n.version > p_event.version
              and deployment_scope(n.data) = place));
end $$;

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
        return may_remove_of_deployment(p_event);
    end if;
    return true;
end $$;

select grant_processes();
