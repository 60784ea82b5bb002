-- The few events that say how a run went: how it stands and how it was evaluated. They are found in a long run
-- without reading what happened in each of its steps.
create index events_milestones on events (run_id, xid, position)
    where type like 'rl.run.%' or type like 'rl.evaluation.%';
