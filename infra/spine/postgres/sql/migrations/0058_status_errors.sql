-- A workspace shows why its forge refused the last commit status.

create index events_posted on events (run_id, xid, position)
    where type in ('rl.status.posted', 'rl.workspace.connected', 'rl.workspace.disconnected');
