-- Organisations, and whose the workspaces are: what `infra/identity/organisations.py` writes and asks.
-- How this file is read: `infra/spine/postgres/queries.py`.

-- name: insert_organisation
insert into organisations (id, name, title, created_by) values ($1, $2, $3, $4) on conflict do nothing
returning created_at

-- part: select_organisations
select id, name, title, created_at, created_by from organisations

-- name: organisation
{select_organisations} where id = $1 or name = $1 order by (id = $1) desc limit 1

-- name: organisations
{select_organisations} where $1::text is null or id = $1 order by created_at, id limit $2

-- name: set_title
update organisations set title = $2 where id = $1 returning id, name, title, created_at, created_by

-- A workspace without a home belongs to the organisation `main`.

-- name: workspaces_of
select workspace from workspace_homes where organisation = $1
union select n.id from names n where $1 = 'main' and n.kind = 'workspace'
  and not exists (select from workspace_homes h where h.workspace = n.id)

-- name: home
select h.organisation, h.repository, coalesce(o.name, h.organisation) as organisation_name
from workspace_homes h left join organisations o on o.id = h.organisation where h.workspace = $1

-- Workspaces are added to an organisation one at a time, so that their number stays within its quota.

-- name: lock_organisation
select id from organisations where id = $1 for update

-- A workspace of `main` from before there were organisations has no home.

-- name: is_known
select exists (select from workspace_homes where workspace = $1)
  or $2 = 'main' and exists (select from names where kind = 'workspace' and id = $1)

-- name: put_home
insert into workspace_homes (workspace, organisation) values ($1, $2) on conflict do nothing

-- A repository moves to the workspace that is given last: another one of the organisation loses it.

-- name: free_repository
update workspace_homes set repository = null
where organisation = $1 and repository = $2 and workspace <> $3

-- name: set_repository
insert into workspace_homes (workspace, organisation, repository) values ($1, $2, $3)
on conflict (workspace) do update set repository = excluded.repository

-- name: propose_repository
update workspace_homes h set repository = $2 where h.workspace = $1 and h.repository is null
and not exists (select from workspace_homes o
                where o.organisation = h.organisation and o.repository = $2)

-- name: workspaces_of_repository
select h.workspace, h.organisation, h.repository, coalesce(o.name, h.organisation)
from workspace_homes h left join organisations o on o.id = h.organisation
where h.repository = $1 and ($2::text[] is null or h.workspace = any($2))
order by h.workspace limit 100
