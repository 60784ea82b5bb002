-- Behind the filters of queries the database itself shows only rows of the workspaces that the sender of a request
-- may see. A process that sets no `headrace.visible` sees all rows, and so do the owner of the tables and backups.

create function shown_workspaces() returns text[] language sql stable as $$
    select nullif(current_setting('headrace.visible', true), '')::text[]
$$;

do $$
declare
    t text;
begin
    foreach t in array array['runs', 'workspaces', 'deliveries', 'pushes', 'triggered_runs'] loop
        execute format('alter table %I enable row level security', t);
        execute format('create policy visible_workspaces on %I using ('
            '(select shown_workspaces()) is null or workspace = any ((select shown_workspaces())::text[]))', t);
    end loop;
end $$;

-- A validation has the workspace of its run.
alter table evaluations enable row level security;
create policy visible_workspaces on evaluations using (
    (select shown_workspaces()) is null or workspace = any ((select shown_workspaces())::text[])
    or workspace is null and run is not null and exists (select from runs r where r.run = evaluations.run));
