-- A fork folds the history of its parent up to its own first step. So some older snapshots of a run are kept, and an
-- index finds where a step of a run or of its policy was settled. They are kept in a table of their own, because
-- processes of the release before go on writing the newest one during an upgrade, by its primary key.

create table kept_snapshots (
    stream       text not null,
    fold_version integer not null,
    version      integer not null,
    state        text not null,
    primary key (stream, fold_version, version)
);

-- The snapshots of a stream are deleted where its events are removed. Those that were kept go with them.
create function forget_kept_snapshots() returns trigger language plpgsql as $$
begin
    delete from kept_snapshots k where k.stream = old.stream;
    return null;
end $$;
create trigger snapshots_are_forgotten after delete on snapshots
    for each row execute function forget_kept_snapshots();

create index events_steps on events (stream, ((data ->> 'step')::integer))
    where type in ('rl.step.settled', 'rl.policy.updated');

-- The run that a run is a fork of, and the step after which it begins.
alter table runs add column parent text, add column parent_step integer;
create index runs_forks on runs (parent, created_at, run) where parent is not null;
