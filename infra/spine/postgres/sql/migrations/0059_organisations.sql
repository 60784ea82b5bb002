-- Organisations have people and workspaces, and names are unique within a workspace or an organisation. What exists
-- moves into the organisation `main`. No event is rewritten: the log names workspaces, and these tables say whose
-- they are.

create table organisations (
    id         text primary key,
    name       text not null unique,
    title      text not null,
    created_at timestamptz not null default clock_timestamp(),
    created_by text not null
);
insert into organisations (id, name, title, created_by) values ('main', 'main', 'main', 'headrace');

create table people (
    id         text primary key,
    name       text not null,
    email      text not null,
    created_at timestamptz not null default clock_timestamp(),
    created_by text not null,
    removed_at timestamptz
);
create unique index people_email on people (lower(email)) where removed_at is null;

create table members (
    organisation text not null,
    person       text not null,
    role         text not null check (role in ('owner', 'member', 'viewer')),
    created_at   timestamptz not null default clock_timestamp(),
    created_by   text not null,
    primary key (organisation, person)
);
create index members_by_person on members (person);

create table workspace_homes (
    workspace    text primary key,
    organisation text not null,
    repository   text
);
create unique index workspace_homes_repository on workspace_homes (organisation, repository);
insert into workspace_homes (workspace, organisation)
select distinct n.id, 'main' from names n where n.kind = 'workspace';

alter table names add column scope text not null default '';
alter table names drop constraint names_pkey;
alter table names add primary key (kind, name, scope);
update names set scope = 'main' where kind = 'workspace';
update names n set scope = coalesce(
    (select g.workspace from run_gates g where g.run_id = n.id),
    (select coalesce(e.data ->> 'workspace', e.data ->> 'belongs_to') from events e
     where e.run_id = n.id and e.type in ('rl.run.requested', 'rl.evaluation.requested')
     order by e.xid, e.position limit 1),
    '')
where n.kind in ('run', 'evaluation');
update names n set scope = coalesce(
    (select e.data ->> 'workspace' from events e
     where e.stream = 'dataset-' || n.id and e.type = 'rl.dataset.registered' order by e.version limit 1),
    'main')
where n.kind = 'dataset';

alter table api_keys add column organisation text, add column person text;
create index api_keys_by_person on api_keys (person) where person is not null;
update api_keys set organisation = 'main' where workspace is not null;

alter table audit add column organisation text;

select grant_processes();
