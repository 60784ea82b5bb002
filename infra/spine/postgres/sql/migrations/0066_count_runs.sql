-- A list of runs counts those of a workspace. Without an index that has them all, the count reads every row.

create index runs_present on runs (workspace) where archived_at is null;
