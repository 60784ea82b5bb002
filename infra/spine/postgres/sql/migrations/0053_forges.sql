-- A provider has models, and a forge has repositories.

alter table connections rename column provider to forge;
alter table workspaces rename column provider to forge;
alter table deliveries rename column provider to forge;

-- From Postgres 18 on, "not null" is a constraint whose name comes from the table and the column.
do $$
begin
    if exists (select from pg_constraint where conname = 'connections_provider_not_null'
               and conrelid = 'connections'::regclass) then
        alter table connections rename constraint connections_provider_not_null to connections_forge_not_null;
    end if;
end $$;
