-- What the API and the dashboard read. Everything up to the marker below follows from the log alone
-- and can be rebuilt from it; JSON stands as text, because nothing here looks into it.

create table runs (
    run            text primary key,
    name           text not null,
    status         text not null default 'pending',
    phase          text not null default 'init',
    algorithm      text not null,
    execution_mode text not null,
    model          text not null,
    dataset        text not null,
    rollout        text,
    workspace      text,
    commit_sha     text,
    current_step   integer,
    total_steps    integer,
    reward         double precision,
    error          text,
    config         text not null,
    dataset_ref    text not null,
    created_at     timestamptz not null,
    started_at     timestamptz,
    completed_at   timestamptz,
    last_at        timestamptz
) with (fillfactor = 50);
create index runs_name on runs (name);
create index runs_recent on runs (created_at desc, run);

create table metric_points (
    run   text not null,
    key   text not null,
    step  integer not null,
    value double precision not null,
    at    timestamptz not null,
    primary key (run, key, step)
);

create table checkpoints (
    run             text not null,
    step            integer not null,
    reward          double precision,
    uri             text not null,
    manifest_sha256 text not null,
    adapter_sha256  text not null,
    created_at      timestamptz not null,
    primary key (run, step)
);

create table graded_groups (
    owner       text not null,
    purpose     text not null,
    step        integer not null,
    slot        integer not null,
    replacement integer not null,
    dataset_row integer not null,
    num_samples integer not null,
    artifact    text not null,
    grades      text not null,
    at          timestamptz not null,
    primary key (owner, purpose, step, slot, replacement)
);

create table log_lines (
    run      text not null,
    xid      bigint not null,
    position bigint not null,
    line     integer not null,
    at       timestamptz not null,
    level    text not null,
    step     integer,
    message  text not null,
    primary key (run, xid, position, line)
);

create table datasets (
    dataset    text primary key,
    name       text not null,
    ref        text not null,
    columns    text not null,
    num_rows   integer not null,
    file_name  text not null,
    file_size  bigint not null,
    original   text not null,
    created_at timestamptz not null
);
create index datasets_name on datasets (name);

create table workspaces (
    workspace  text primary key,
    name       text not null,
    url        text not null,
    status     text not null default 'pending',
    commit_sha text,
    rollouts   text not null default '[]',
    error      text,
    created_at timestamptz not null,
    updated_at timestamptz
);
create index workspaces_name on workspaces (name);

create table evaluations (
    evaluation   text primary key,
    name         text not null,
    run          text,
    step         integer,
    status       text not null default 'pending',
    model        text not null,
    dataset      text not null,
    rollout      text,
    reward       double precision,
    metrics      text not null default '{}',
    error        text,
    config       text,
    dataset_ref  text not null,
    total        integer not null,
    created_at   timestamptz not null,
    started_at   timestamptz,
    completed_at timestamptz
);
create index evaluations_name on evaluations (name);
create index evaluations_recent on evaluations (created_at desc, evaluation) where run is null;

-- The marker. What follows is not in the log: names taken at the edge before anything is appended
-- under them, uploads that are not datasets yet, and the doors of the workers alive.

create table names (
    kind       text not null,
    name       text not null,
    id         text not null,
    created_at timestamptz not null default clock_timestamp(),
    primary key (kind, name)
);

create table dataset_uploads (
    id         text primary key,
    name       text not null,
    file_name  text not null,
    status     text not null,
    error      text,
    created_at timestamptz not null default clock_timestamp()
);

create table worker_doors (
    worker     text primary key,
    url        text not null,
    key        text not null,
    updated_at timestamptz not null default clock_timestamp()
);
