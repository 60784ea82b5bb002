-- A dataset that belongs to no workspace is shared within its organisation (null: `main`), no longer in the
-- installation.

alter table datasets add column organisation text;
alter table dataset_uploads add column organisation text;

-- The names of runs and workspaces are read by scope.
create index names_by_scope on names (kind, scope);

select grant_processes();
