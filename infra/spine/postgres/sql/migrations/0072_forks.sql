-- A fork folds the history of its parent up to its own first step. So some older snapshots of a run are kept, and an
-- index finds where a step of a run or of its policy was settled.

alter table snapshots drop constraint snapshots_pkey;
alter table snapshots add primary key (stream, fold_version, version);

create index events_steps on events (stream, ((data ->> 'step')::integer))
    where type in ('rl.step.settled', 'rl.policy.updated');

-- The run that a run is a fork of, and the step after which it begins.
alter table runs add column parent text, add column parent_step integer;
create index runs_forks on runs (parent, created_at, run) where parent is not null;
