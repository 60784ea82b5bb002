-- The schema as it is now: what the migrations, applied one after the other, end in.
--
-- This file is for reading. A database is made by `migrations/*.sql` alone, and a test compares the two
-- (tests/unit/infra/spine/postgres/test_schema.py): change this file in the commit that adds a migration.
-- Comments and white space are free. Columns that a migration added stand last in their table, because
-- that is where the database has them.
--
-- In this order: the log, what consumers have read, effects and their workers, the commit of a decision,
-- claims, the horizon of the log, the bus, the read model, what edges keep, the installation, retention,
-- and the rights of processes.
--
-- The functions raise these SQLSTATEs of their own:
--   HR001  stale: a stream has another version than the caller has read
--   HR002  fenced: a claim was lost to another worker
--   HR003  refused: an event is never rewritten; a claim names a generation that is over
--   HR004  a consumed event lies below its consumer's watermark; a removal is not allowed, and says why


-- == The log ==============================================================================================

-- The version of each stream. A row with version 0 is a stream that was looked up and has no event yet.
create table streams (
    stream  text primary key,
    version integer not null
) with (fillfactor = 50);

-- Every event of every stream. The uniqueness of (stream, version) follows from `streams`, never from a
-- unique index here, so that this table can be partitioned by position later. Readers follow
-- (xid, position) and stop below the horizon, because no transaction below it can still commit.
create table events (
    position       bigint generated always as identity,
    xid            xid8 not null default pg_current_xact_id(),
    id             uuid not null,
    stream         text not null,
    version        integer not null,
    type           text not null,
    schema_version integer not null,
    data           json not null,
    run_id         text not null,
    causation      uuid,
    correlation    uuid not null,
    traceparent    text,
    time           timestamptz not null default clock_timestamp(),
    actor          text
);
create index events_tail on events (xid, position);
create index events_stream on events (stream, version);
create index events_run on events (run_id, xid, position);
-- The few events that say how a run went: how it stands and how it was evaluated. They are found in a long run
-- without reading what happened in each of its steps.
create index events_milestones on events (run_id, xid, position)
    where type like 'rl.run.%' or type like 'rl.evaluation.%';
-- Where a step of a run, or of its policy, was settled.
create index events_steps on events (stream, ((data ->> 'step')::integer))
    where type in ('rl.step.settled', 'rl.policy.updated');
-- Only what edges appended: such an event begins a correlation of its own, and a retry of the edge finds it
-- here by its id. The log itself remembers, so no row in the inbox has to be kept for it.
create index events_edge on events (id) where causation = correlation;

-- Hashes of the URIs that an event names. JSON never escapes a URI of ours, because it is percent-encoded. Splitting
-- the text takes a third of the time of a regular expression.
create function named_hashes(p_data json) returns bigint[] language sql immutable as $$
    select array(
        select distinct hashtextextended(split_part(p.part, '"', 1), 0)
        from unnest((string_to_array(replace(p_data::text, '"uri": "', '"uri":"'), '"uri":"'))[2:]) p (part))
$$;
-- Without a list of pending entries, which every look-up would read.
create index events_names on events using gin (named_hashes(data)) with (fastupdate = off)
    where data::text like '%"uri"%';

-- Those of the URIs that an event names. Two URIs with one hash are taken for one: then a blob stays.
-- The settings and `limit` fix the plan: a look-up for each URI, also before the table was analyzed.
create function named_uris(p_uris text[]) returns setof text language sql stable
set enable_seqscan = off set enable_indexscan = off as $$
    select u.uri from unnest(p_uris) as u (uri) cross join lateral (
        select from events e
        where e.data::text like '%"uri"%' and named_hashes(e.data) @> array[hashtextextended(u.uri, 0)]
        limit 1) named
$$;

-- The types of events that records end with, or consist of.
create function is_record(p_type text) returns boolean language sql immutable as $$
    select p_type in (
        'rl.evaluation.completed', 'rl.verification.completed',
        'rl.hub-upload.uploaded', 'rl.hub-upload.failed', 'rl.hub-push.pushed', 'rl.hub-push.failed',
        'rl.status.decided', 'rl.status.posted',
        'rl.workspace.push-received', 'rl.workspace.hook-pinged', 'rl.workspace.refs-check-requested',
        'rl.model.deploy-requested', 'rl.model.deployed', 'rl.model.deploy-failed',
        'rl.model.deploy-skipped', 'rl.model.undeploy-requested', 'rl.model.undeployed',
        'rl.dead-letter.redriven',
        'rl.workspace.refs-requested', 'rl.workspace.refs-listed', 'rl.workspace.refs-moved',
        'rl.workspace.commit-requested', 'rl.workspace.packages-chosen', 'rl.workspace.synced',
        'rl.workspace.rejected', 'rl.workspace.pushed',
        'rl.trigger.push-examined', 'rl.trigger.skipped')
$$;
create index events_records on events (type, time, position) where is_record(type);
-- Whose name an event about a deployment means: a workspace, '' for none, null for an event of an earlier release that
-- says only a name.
create function deployment_scope(p_data json) returns text language sql immutable as $$
    select case
        when p_data -> 'served' is not null then coalesce(p_data -> 'served' ->> 'workspace', '')
        else p_data ->> 'scope' end
$$;

-- What became of each name that was deployed. All deployments have one stream.
create index events_deployed on events ((data ->> 'deployment'), type, version)
    where type in ('rl.model.deployed', 'rl.model.undeployed', 'rl.model.deploy-requested');
-- What became of a push, by its number, and of a run that it triggered, by its id.
create index events_triggers on events (stream, (coalesce(data ->> 'run', data -> 'push' ->> 'number')), version)
    where type like 'rl.trigger.%';
create index events_refs on events (stream, type, version)
    where type in ('rl.workspace.refs-requested', 'rl.workspace.refs-listed', 'rl.workspace.commit-requested',
                   'rl.workspace.pushed');
-- The syncs that look at a whole commit, and not only at what a run needs.
create index events_synced on events (stream, version)
    where type = 'rl.workspace.synced' and data ->> 'requester' is null;
-- Whether the forge of a workspace took the last commit status, unless it was connected or disconnected since.
create index events_posted on events (run_id, xid, position)
    where type in ('rl.status.posted', 'rl.workspace.connected', 'rl.workspace.disconnected');

-- An event is a fact: nobody rewrites or removes one, whatever the rights of the role. The exception is the
-- transaction in which one of the retention functions below runs; `begin_removal` marks it.
create function refuse_rewriting() returns trigger language plpgsql as $$
begin
    if tg_op = 'DELETE' and current_setting('headrace.removes', true) = pg_current_xact_id()::text then
        return null;
    end if;
    raise exception 'events are facts: % is refused', tg_op using errcode = 'HR003';
end $$;
create trigger events_are_facts before update or delete or truncate on events
    for each statement execute function refuse_rewriting();

-- Small artifacts, written by the decision that names them. Large ones are blobs.
create table artifacts (
    sha256 text primary key,
    data   bytea not null
);

-- Folded states of streams, under the number of their fold. A cache: losing one costs a longer fold.
create table snapshots (
    stream       text not null,
    fold_version integer not null,
    version      integer not null,
    state        text not null,
    primary key (stream, fold_version)
);

-- Of streams that others may continue, one older snapshot in every few thousand versions
-- (`infra/spine/runtime/folded_states.py`).
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


-- == What consumers have read =============================================================================

-- One row per consumed event above the consumer's watermark. `xid` is the consuming transaction's, and so is
-- never below the event's own: rows below the watermark's xid can be deleted.
create table inbox (
    consumer text not null,
    event_id uuid not null,
    xid      xid8 not null default pg_current_xact_id(),
    primary key (consumer, event_id)
);
alter table inbox set (autovacuum_vacuum_scale_factor = 0.02);

-- Each consumer has consumed every event up to and including its watermark.
create table watermarks (
    consumer text primary key,
    xid      xid8 not null,
    position bigint not null
);


-- == Effects, and the workers that perform them ===========================================================

-- The leases of worker processes. `generation` counts how often a worker gave back claims that it does not
-- know of: a claim that a network delivers late names a generation that is over, and takes nothing. `decider` is the
-- decider version of the process.
create table workers (
    id         text primary key,
    host       text not null,
    pid        integer not null,
    lanes      text[] not null default '{}',
    started_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null,
    generation integer not null default 0,
    decider    integer not null default 1
);

-- Whether the effects of a run may be claimed. `decider` is the decider version that a worker needs for them
-- (schemas/events/decider_version.py). `state` follows from the run's own events. `holds` counts the
-- dead letters that pause the run, which is independent of its state. `weight` is the run's share next to others, and
-- `workspace` the workspace whose quota of samples in flight counts its samples.
create table run_gates (
    run_id text primary key,
    state  text not null check (state in ('open', 'paused', 'closed')),
    holds  integer not null default 0,
    weight integer not null default 1,
    workspace text,
    decider integer not null default 1
);
-- The few runs that some processes may not work on.
create index gates_newer on run_gates (decider) where decider > 1;
create index gates_resting on run_gates (run_id) where state = 'paused' or holds > 0;

-- The workspace of a run or an evaluation, noted when it is requested. An evaluation that a run requested has that of
-- the run.
create function note_workspace() returns trigger language plpgsql as $$
declare
    owner text := coalesce(new.data ->> 'evaluation', new.data ->> 'run');
    found_workspace text := coalesce(new.data ->> 'workspace', new.data ->> 'belongs_to', (
        select g.workspace from run_gates g where g.run_id = new.run_id));
begin
    if found_workspace is not null then
        insert into run_gates as g (run_id, state, workspace) values (owner, 'open', found_workspace)
        on conflict (run_id) do update set workspace = excluded.workspace;
        -- Samples that the same decision requested, before its events were written.
        update effects e set workspace = found_workspace where e.run_id = owner and e.lane = 'generate';
    end if;
    return null;
end $$;
create trigger events_note_workspace after insert on events for each row
    when (new.type in ('rl.run.requested', 'rl.evaluation.requested')) execute function note_workspace();

-- Work that was requested and is not finished. A claim is (worker, epoch), and is live while the lease of its
-- worker is. An outcome is accepted only under the epoch of the claim. `shut` repeats what the run's gate
-- says, so that the index of claimable effects leaves out the runs that rest; a claim checks the gate as well. `turn`
-- orders what can be claimed, `size` is how many places of its lane it takes, and `later` says that it is not due
-- before `due_at`. `deaths` counts the workers that died while they held it, `crashes` the deaths that it is blamed
-- for. `workspace` is the workspace whose quota of samples in flight counts it: empty for other lanes, and for runs
-- without a workspace.
create table effects (
    id          uuid primary key,
    consumer    text not null,
    stream      text not null,
    lane        text not null,
    run_id      text not null,
    type        text not null,
    data        json not null,
    correlation uuid not null,
    traceparent text,
    created     bigint generated always as identity,
    due_at      timestamptz not null default clock_timestamp(),
    worker      text,
    epoch       integer not null default 0,
    attempts    integer not null default 0,
    crashes     integer not null default 0,
    memo        text,
    error       text,
    shut        boolean not null default false,
    turn        double precision not null default 0,
    size        integer not null default 1,
    later       boolean not null default false,
    deaths      integer not null default 0,
    progressed_at timestamptz default clock_timestamp(),
    workspace   text not null default '',
    wasted_s    double precision not null default 0,
    claimed_at  timestamptz default clock_timestamp()
) with (fillfactor = 50);
alter table effects set (autovacuum_vacuum_scale_factor = 0.02);
-- What can be claimed, in the order in which it is claimed, and what is to be tried again later.
create index effects_ready on effects (lane, consumer, turn, created)
    where worker is null and not shut and not later;
create index effects_later on effects (lane, consumer, due_at)
    where worker is null and not shut and later;
-- Samples that can be claimed, by workspace.
create index effects_samples on effects (consumer, workspace, turn, created)
    where lane = 'generate' and worker is null and not shut and not later;
-- What is claimed: dead holders are found by going from holder to holder, and so are the samples in flight of a
-- workspace.
create index effects_held on effects (worker, workspace) where worker is not null;
-- What is performed, by its turn.
create index effects_performed on effects (lane, turn) where worker is not null;
-- The last turn of a run in a lane.
create index effects_run on effects (run_id, lane, turn);

-- When an effect was claimed, or saved its memo: since then it has shown no progress. What is born claimed has
-- the defaults.
create function note_progress() returns trigger language plpgsql as $$
begin
    new.progressed_at := clock_timestamp();
    if new.epoch <> old.epoch then
        new.claimed_at := new.progressed_at;
    end if;
    return new;
end $$;
create trigger effects_progress before update of epoch, memo on effects for each row
    when (new.epoch <> old.epoch or new.memo is distinct from old.memo) execute function note_progress();

-- The turn of a lane: the largest of what is performed, else that of the next effect of this consumer that can be
-- claimed or will be due, else 0. A lane without work begins again, so nobody saves up turns while it idles.
create function lane_turn(p_lane text, p_consumer text) returns double precision
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off as $$
begin
    return coalesce(
        (select e.turn from effects e where e.lane = p_lane and e.worker is not null
         order by e.turn desc limit 1),
        (select e.turn from effects e
         where e.lane = p_lane and e.consumer = p_consumer and e.worker is null and not e.shut and not e.later
         order by e.turn, e.created limit 1),
        (select e.turn from effects e
         where e.lane = p_lane and e.consumer = p_consumer and e.worker is null and not e.shut and e.later
         order by e.due_at limit 1),
        0);
end $$;

-- The turn after which the effects that a run requests in a lane come: start-time fair queuing. A run that has
-- requested much comes after those that have not, and one that has slept has no advantage.
create function next_turn(p_run text, p_lane text, p_consumer text) returns double precision
language plpgsql stable set enable_seqscan = off set enable_bitmapscan = off as $$
begin
    return greatest(lane_turn(p_lane, p_consumer), (
        select e.turn from effects e where e.run_id = p_run and e.lane = p_lane
        order by e.turn desc limit 1));
end $$;

-- Whether effects of these lanes and consumers wait (some for a later time) or are claimed. Those of runs that are
-- paused, held or closed do not count.
create function has_unfinished(p_lanes text[], p_consumers text[], p_decider integer) returns boolean
language sql stable set enable_seqscan = off set enable_bitmapscan = off as $$
    select exists (
        select from unnest(p_lanes) l (lane) cross join unnest(p_consumers) c (consumer)
        cross join lateral (
            (select from effects e
             where e.worker is null and not e.shut and not e.later
               and e.lane = l.lane and e.consumer = c.consumer
               and not exists (select from run_gates g where g.run_id = e.run_id
                               and (g.state <> 'open' or g.holds > 0 or g.decider > p_decider))
             order by e.turn limit 1)
            union all
            (select from effects e
             where e.worker is null and not e.shut and e.later
               and e.lane = l.lane and e.consumer = c.consumer
               and not exists (select from run_gates g where g.run_id = e.run_id
                               and (g.state <> 'open' or g.holds > 0 or g.decider > p_decider))
             order by e.due_at limit 1)
        ) waiting
    ) or exists (
        select from unnest(p_lanes) l (lane)
        cross join lateral (
            select from effects e
            where e.worker is not null and e.lane = l.lane and e.consumer = any (p_consumers)
              and not exists (select from run_gates g where g.run_id = e.run_id
                              and (g.state <> 'open' or g.holds > 0 or g.decider > p_decider))
            order by e.turn limit 1
        ) held
    )
$$;

-- The same for processes of the version before, which still run during an upgrade.
create function has_unfinished(p_lanes text[], p_consumers text[]) returns boolean
language sql stable as $$ select has_unfinished(p_lanes, p_consumers, 1) $$;

-- The effects of each lane that has any: how many wait, counted up to p_most, how many are claimed under a live
-- lease, and since when the longest of those waits that are next in the queue of their consumer. What a dead worker
-- holds waits too. Paused runs do not count.
create function count_effects(p_most integer)
returns table (r_lane text, r_waiting integer, r_claimed integer, r_oldest_s double precision)
language sql stable set enable_seqscan = off set enable_bitmapscan = off as $$
    with recursive ready (lane, consumer) as (
        (select e.lane, e.consumer from effects e where e.worker is null and not e.shut and not e.later
         order by e.lane, e.consumer limit 1)
        union all
        select n.lane, n.consumer from ready r cross join lateral (
            select e.lane, e.consumer from effects e where e.worker is null and not e.shut and not e.later
              and (e.lane, e.consumer) > (r.lane, r.consumer)
            order by e.lane, e.consumer limit 1) n
    ), later (lane, consumer) as (
        (select e.lane, e.consumer from effects e where e.worker is null and not e.shut and e.later
         order by e.lane, e.consumer limit 1)
        union all
        select n.lane, n.consumer from later r cross join lateral (
            select e.lane, e.consumer from effects e where e.worker is null and not e.shut and e.later
              and (e.lane, e.consumer) > (r.lane, r.consumer)
            order by e.lane, e.consumer limit 1) n
    ), found (lane, waiting, claimed, due_at) as (
        select r.lane, c.number, 0, case when h.due_at <= clock_timestamp() then h.due_at end from ready r
        cross join lateral (
            select e.due_at from effects e
            where e.worker is null and not e.shut and not e.later
              and e.lane = r.lane and e.consumer = r.consumer
            order by e.turn, e.created limit 1) h
        cross join lateral (
            select count(*) as number from (
                select from effects e
                where e.worker is null and not e.shut and not e.later
                  and e.lane = r.lane and e.consumer = r.consumer limit p_most) one) c
        union all
        select r.lane, c.number, 0, case when h.due_at <= clock_timestamp() then h.due_at end from later r
        cross join lateral (
            select e.due_at from effects e
            where e.worker is null and not e.shut and e.later
              and e.lane = r.lane and e.consumer = r.consumer
            order by e.due_at limit 1) h
        cross join lateral (
            select count(*) as number from (
                select from effects e
                where e.worker is null and not e.shut and e.later
                  and e.lane = r.lane and e.consumer = r.consumer limit p_most) one) c
        union all
        select e.lane, count(*) - count(w.id), count(w.id),
               min(e.due_at) filter (where w.id is null and not e.shut)
        from effects e left join workers w on w.id = e.worker and w.expires_at > clock_timestamp()
        where e.worker is not null group by e.lane
    )
    select f.lane, least(sum(f.waiting), p_most)::integer, sum(f.claimed)::integer,
           extract(epoch from clock_timestamp() - min(f.due_at))::float8
    from found f group by f.lane order by f.lane
$$;

-- A gate that moves takes the effects of its run along. When it shuts, effects that other transactions hold at
-- this moment are skipped. When it opens, each of them is waited for: one that stayed shut would never be
-- claimed.
create function shut_effects() returns trigger language plpgsql as $$
begin
    if new.state = 'paused' or new.holds > 0 then
        update effects e set shut = true
        where e.id in (select c.id from effects c where c.run_id = new.run_id and not c.shut
                       for update skip locked);
    else
        -- They come after what is performed now. The turns that they had are of another time.
        update effects e set shut = false, turn = o.turn
        from (select c.id, l.turn + sum(c.size) over (partition by c.lane order by c.turn, c.created)::float8
                                    / new.weight as turn
              from effects c
              join (select d.lane, d.consumer, lane_turn(d.lane, d.consumer) as turn
                    from (select distinct f.lane, f.consumer from effects f
                          where f.run_id = new.run_id and f.shut) d) l using (lane, consumer)
              where c.run_id = new.run_id and c.shut) o
        where e.id = o.id;
    end if;
    return null;
end $$;
create trigger gates_set after insert on run_gates for each row
when (new.state = 'paused' or new.holds > 0)
execute function shut_effects();
create trigger gates_moved after update on run_gates for each row
when ((old.state = 'paused' or old.holds > 0) <> (new.state = 'paused' or new.holds > 0))
execute function shut_effects();


-- == The commit of a decision =============================================================================

-- Write one decision, whole or not at all; returns the place of each event. The arguments are columns, one
-- array each:
--   p_consumers, p_consumed, p_xids, p_positions   events consumed, and where each lay in the log (null: it came
--                                                  from the same commit)
--   p_finished, p_epochs                           effects finished by p_worker, and the epoch of each claim
--   p_streams, p_expected, p_versions              streams that the decision was made on, in the order of their
--                                                  names: the version that was read, and the one afterwards
--   e_*                                            events to append, in order; e_actor: who appended each, or null
--   f_*                                            effects to request; f_claimed: p_worker performs it at once;
--                                                  f_size: its places (an array that is too short: 1)
--   w_*                                            the weights of runs
--   a_*                                            small artifacts
--   g_*                                            gates to set: a state, or 'hold' or 'release', or 'reopened',
--                                                  which only a closed gate follows, or 'decider N'
-- Raises HR001 (a stream moved), HR002 (a claim was lost), HR004 (an event lies below its consumer's watermark),
-- or a unique violation on the inbox (an event is consumed already).
--
-- Every transaction locks in one order: gates by name, then the inbox, then effects, then streams by name.
create function commit_decision(
    p_worker text,
    p_consumers text[], p_consumed uuid[], p_xids xid8[], p_positions bigint[],
    p_finished uuid[], p_epochs integer[],
    p_streams text[], p_expected integer[], p_versions integer[],
    e_id uuid[], e_stream text[], e_version integer[], e_type text[], e_schema integer[],
    e_data text[], e_run text[], e_causation uuid[], e_correlation uuid[], e_trace text[],
    f_id uuid[], f_consumer text[], f_stream text[], f_lane text[], f_run text[], f_type text[],
    f_data text[], f_correlation uuid[], f_trace text[], f_claimed boolean[],
    a_sha text[], a_data bytea[],
    g_run text[], g_state text[],
    e_actor text[], f_size integer[], w_run text[], w_weight integer[]
) returns table (r_position bigint, r_xid xid8, r_time timestamptz)
language plpgsql as $$
declare
    lost uuid;
    held integer;
    resting text[];
begin
    -- Gates first. Setting a gate locks it, and the gates of runs whose effects are requested or finished.
    -- Otherwise only the gates of runs that rest are locked, shared, so that their effects are born shut.
    if cardinality(g_run) > 0 then
        select array_agg(g.run_id) filter (where g.rests) into resting from (
            select r.run_id, r.state = 'paused' or r.holds > 0 as rests from run_gates r
            where r.run_id = any (g_run || f_run || array(
                select e.run_id from effects e where e.id = any (p_finished)))
            order by r.run_id for no key update
        ) g;
    elsif (cardinality(f_run) > 0 or cardinality(p_finished) > 0)
          and exists (select from run_gates r where r.state = 'paused' or r.holds > 0) then
        select array_agg(g.run_id) into resting from (
            select r.run_id from run_gates r
            where r.run_id = any (f_run || array(
                      select e.run_id from effects e where e.id = any (p_finished)))
              and (r.state = 'paused' or r.holds > 0)
            order by r.run_id for share
        ) g;
    end if;
    -- Consumed, once: the primary key refuses a second time, and the watermark one that was purged.
    if cardinality(p_consumed) > 0 then
        insert into inbox (consumer, event_id) select * from unnest(p_consumers, p_consumed);
        -- The cheap query first: a watermark that far is rare.
        if exists (select from watermarks m
                   where m.consumer = any (p_consumers) and m.xid >= any (p_xids)) then
            select c.id into lost
            from unnest(p_consumers, p_consumed, p_xids, p_positions) as c (consumer, id, xid, position)
            join watermarks m on m.consumer = c.consumer and (m.xid, m.position) >= (c.xid, c.position)
            limit 1;
            if found then
                raise exception '%', lost using errcode = 'HR004';
            end if;
        end if;
    end if;
    -- Finished, under the claims that the worker still holds.
    if cardinality(p_finished) > 0 then
        with gone as (
            delete from effects e using unnest(p_finished, p_epochs) as f (id, epoch)
            where e.id = f.id and e.epoch = f.epoch and e.worker = p_worker
            returning e.id
        )
        select f.id into lost from unnest(p_finished) as f (id)
        where f.id not in (select gone.id from gone) limit 1;
        if lost is not null then
            raise exception '%', lost using errcode = 'HR002';
        end if;
    end if;
    -- A run that closes needs none of its effects; in the order of ids, as others lock them.
    if 'closed' = any (g_state) then
        delete from effects where id in (
            select e.id from effects e
            where e.run_id in (select g.run from unnest(g_run, g_state) as g (run, state)
                               where g.state = 'closed')
            order by e.id for update);
    end if;
    -- Streams move from the version that was read. One that gets no event must still have it, and keep it until
    -- this transaction ends. One that does not exist gets a row with version 0, so that a transaction that
    -- creates the stream meets it.
    for i in 1 .. cardinality(p_streams) loop
        if p_expected[i] = 0 and p_versions[i] > 0 then
            insert into streams as s (stream, version) values (p_streams[i], p_versions[i])
            on conflict (stream) do update set version = excluded.version where s.version = 0;
        elsif p_versions[i] > p_expected[i] then
            update streams set version = p_versions[i]
            where stream = p_streams[i] and version = p_expected[i];
        else
            if p_expected[i] = 0 then
                insert into streams (stream, version) values (p_streams[i], 0)
                on conflict do nothing;
                continue when found;
            end if;
            perform from streams
            where stream = p_streams[i] and version = p_expected[i] for share;
        end if;
        if not found then
            raise exception '%', p_streams[i] using errcode = 'HR001';
        end if;
    end loop;
    if cardinality(w_run) > 0 then
        insert into run_gates as g (run_id, state, weight)
        select w.run, 'open', w.weight from unnest(w_run, w_weight) as w (run, weight) order by w.run
        on conflict (run_id) do update set weight = excluded.weight;
    end if;
    -- Effects, but none in the name of a closed run: nobody would ever claim it. The turns of a run in a lane
    -- follow each other, and none lies before the turn of the lane. Both are read without a lock: of two
    -- decisions at the same moment each may not see the turns of the other.
    if cardinality(f_id) > 0 then
        insert into effects (id, consumer, stream, lane, run_id, type, data, correlation,
                             traceparent, worker, epoch, shut, size, turn, workspace)
        with asked as materialized (
            select f.*, coalesce(f.given, 1) as size from unnest(
                f_id, f_consumer, f_stream, f_lane, f_run, f_type, f_data, f_correlation, f_trace,
                f_claimed, f_size) with ordinality
                as f (id, consumer, stream, lane, run, type, data, correlation, trace, claimed, given, n)
        ), shares as materialized (
            select s.run, s.lane, s.consumer, next_turn(s.run, s.lane, s.consumer) as turn,
                   coalesce(g.weight, 1) as weight,
                   case when s.lane = 'generate' then coalesce(g.workspace, '') else '' end as workspace
            from (select distinct a.run, a.lane, a.consumer from asked a) s
            left join run_gates g on g.run_id = s.run
        )
        select a.id, a.consumer, a.stream, a.lane, a.run, a.type, a.data::json, a.correlation,
               a.trace, case when a.claimed then p_worker end, case when a.claimed then 1 else 0 end,
               coalesce(a.run = any (resting), false), a.size,
               s.turn + sum(a.size) over (partition by a.run, a.lane order by a.n)::float8 / s.weight,
               s.workspace
        from asked a join shares s using (run, lane, consumer)
        where not exists (select from run_gates g where g.run_id = a.run and g.state = 'closed')
        order by a.n
        on conflict (id) do nothing;
    end if;
    if cardinality(a_sha) > 0 then
        insert into artifacts (sha256, data) select * from unnest(a_sha, a_data)
        on conflict do nothing;
    end if;
    for i in 1 .. cardinality(g_run) loop
        if g_state[i] in ('hold', 'release') then
            held := case g_state[i] when 'hold' then 1 else -1 end;
            insert into run_gates as g (run_id, state, holds)
            values (g_run[i], 'open', greatest(held, 0))
            on conflict (run_id) do update set holds = greatest(g.holds + held, 0);
            continue;
        end if;
        if g_state[i] like 'decider %' then
            insert into run_gates as g (run_id, state, decider)
            values (g_run[i], 'open', substr(g_state[i], 9)::integer)
            on conflict (run_id) do update set decider = excluded.decider;
            continue;
        end if;
        if g_state[i] = 'reopened' then
            update run_gates set state = 'open' where run_id = g_run[i] and state = 'closed';
            continue;
        end if;
        insert into run_gates as g (run_id, state) values (g_run[i], g_state[i])
        on conflict (run_id) do update set state = excluded.state where g.state <> 'closed';
        if g_state[i] = 'closed' then
            delete from effects where run_id = g_run[i];
        end if;
    end loop;
    return query
        insert into events (id, stream, version, type, schema_version, data, run_id, causation,
                            correlation, traceparent, actor)
        select e.id, e.stream, e.version, e.type, e.schema, e.data::json, e.run, e.causation,
               e.correlation, e.trace, e.actor
        from unnest(e_id, e_stream, e_version, e_type, e_schema, e_data, e_run, e_causation,
                    e_correlation, e_trace, e_actor)
             with ordinality
             as e (id, stream, version, type, schema, data, run, causation, correlation, trace, actor, n)
        order by e.n
        returning events.position, events.xid, events.time;
end $$;

-- The same with the signature of the version before, for its processes that still run during an upgrade.
create function commit_decision(
    p_worker text,
    p_consumers text[], p_consumed uuid[], p_xids xid8[], p_positions bigint[],
    p_finished uuid[], p_epochs integer[],
    p_streams text[], p_expected integer[], p_versions integer[],
    e_id uuid[], e_stream text[], e_version integer[], e_type text[], e_schema integer[],
    e_data text[], e_run text[], e_causation uuid[], e_correlation uuid[], e_trace text[],
    f_id uuid[], f_consumer text[], f_stream text[], f_lane text[], f_run text[], f_type text[],
    f_data text[], f_correlation uuid[], f_trace text[], f_claimed boolean[],
    a_sha text[], a_data bytea[],
    g_run text[], g_state text[],
    e_actor text[]
) returns table (r_position bigint, r_xid xid8, r_time timestamptz)
language sql as $$
    select * from commit_decision(
        p_worker, p_consumers, p_consumed, p_xids, p_positions, p_finished, p_epochs, p_streams,
        p_expected, p_versions, e_id, e_stream, e_version, e_type, e_schema, e_data, e_run, e_causation,
        e_correlation, e_trace, f_id, f_consumer, f_stream, f_lane, f_run, f_type, f_data,
        f_correlation, f_trace, f_claimed, a_sha, a_data, g_run, g_state, e_actor,
        '{}', '{}', '{}')
$$;


-- == Claims ===============================================================================================

-- Give back what a dead worker held. Its death counts one crash. Nobody saw which effect caused it, so the one that
-- most workers died with is blamed. An effect that outlives two deaths takes twice as many places, and twice as many
-- again after each further one. So it is performed beside ever fewer others, at last alone, and an effect that ends
-- its workers is soon the only one to blame. One claim at a time gives back, so that no death counts twice.
--
-- The time from the claim to the death is wasted: to the end of the lease, because the worker had its device until then.
-- What the worker held shares it, the lanes of a device apart from those of the CPU.
create function give_back_effects(p_dead text) returns void language plpgsql
set enable_seqscan = off set enable_bitmapscan = off as $$
begin
    if not pg_try_advisory_xact_lock(hashtext('headrace deaths'), hashtext(p_dead)) then
        return;
    end if;
    with held as materialized (
        select e.id, e.deaths, e.crashes, e.turn, e.created, e.lane, e.claimed_at from effects e
        where e.worker = p_dead for update skip locked
    ), blamed as (
        select h.id from held h order by h.deaths desc, h.crashes, h.turn, h.created limit 1
    ), lost as (
        select h.id, greatest(0, extract(epoch from
                   least(w.expires_at, clock_timestamp()) - h.claimed_at))::float8
               / count(*) over (partition by h.lane in ('generate', 'train', 'serve')) as wasted_s
        from held h left join workers w on w.id = p_dead
    )
    update effects e
    set worker = null, deaths = e.deaths + 1, wasted_s = e.wasted_s + coalesce(l.wasted_s, 0),
        size = e.size * case when e.deaths between 1 and 16 then 2 else 1 end,
        crashes = e.crashes + (e.id = (select b.id from blamed b))::integer
    from lost l where e.id = l.id;
end $$;

-- How many places of the lane `generate` the runs of a workspace may take together; null is without a limit, as for
-- runs without a workspace. p_most is the limit of a workspace that has none of its own.
create function sample_limit(p_workspace text, p_most bigint) returns bigint language plpgsql stable as $$
declare
    own_most bigint;
begin
    if coalesce(p_workspace, '') = '' then
        return null;
    end if;
    select q.most into own_most from workspace_quotas q
    where q.workspace = p_workspace and q.name = 'samples_in_flight';
    return case when found then own_most else p_most end;
end $$;

-- Claim samples of a consumer, of each workspace as long as its samples in flight stay within its limit. A sample or
-- a group that is larger than that limit is claimed when the workspace has nothing else in flight. The workspaces are
-- asked one by one, because an index scan in the order of turns would meet all samples of one that is at its limit.
-- Of p_room samples, those of the workspace whose next sample comes n-th are at most p_room - n + 1, and the others
-- are asked for their next sample only. What is in flight is counted from worker to worker, up to the limit. The
-- comparisons of rows keep the planner from another index, whose order would have to be sorted.
create function claim_samples(
    p_worker text, p_decider integer, p_consumer text, p_room integer, p_samples bigint
)
returns setof effects language sql
set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off set enable_sort = off as $$
    with recursive holders (name) as (
        (select e.worker from effects e where e.worker is not null order by e.worker limit 1)
        union all
        select (select e.worker from effects e where e.worker > h.name order by e.worker limit 1)
        from holders h where h.name is not null
    ), spaces (workspace) as (
        (select e.workspace from effects e
         where e.lane = 'generate' and e.worker is null and not e.shut and not e.later and e.consumer = p_consumer
         order by e.workspace limit 1)
        union all
        select (select e.workspace from effects e
                where e.lane = 'generate' and e.worker is null and not e.shut and not e.later
                  and e.consumer = p_consumer and e.workspace > s.workspace
                order by e.workspace limit 1)
        from spaces s where s.workspace is not null
    ), heads as materialized (
        select s.workspace, head.turn, head.created
        from spaces s cross join lateral (
            select e.turn, e.created from effects e
            where e.lane = 'generate' and e.worker is null and not e.shut and not e.later
              and e.consumer = p_consumer and e.workspace = s.workspace
              and e.due_at <= (select clock_timestamp())
              and coalesce((select g.state = 'open' and g.holds = 0 and g.decider <= p_decider
                            from run_gates g where g.run_id = e.run_id), true)
            order by e.turn, e.created limit 1) head
        order by head.turn, head.created
    ), free as materialized (
        select h.workspace, l.most, t.together, row_number() over () as rank
        from heads h
        cross join lateral (select sample_limit(h.workspace, p_samples) as most offset 0) l
        cross join lateral (
            select coalesce(sum(c.size), 0) as together from (
                select o.size from holders w cross join lateral (
                    select e.size from effects e
                    where e.worker is not null and (e.worker, e.workspace) >= (w.name, h.workspace)
                      and (e.worker, e.workspace) <= (w.name, h.workspace)
                    order by e.worker, e.workspace limit l.most) o
                where l.most is not null limit l.most) c) t
        where l.most is null or t.together < l.most
        limit p_room
    ), next as materialized (
        select n.place from (
            select w.*, f.most, f.together
                        + sum(w.size) over (partition by f.workspace order by w.turn, w.created) as after
            from free f cross join lateral (
                select e.ctid as place, e.turn, e.created, e.size from effects e
                where e.lane = 'generate' and e.worker is null and not e.shut and not e.later
                  and e.consumer = p_consumer and e.workspace = f.workspace
                  and e.due_at <= (select clock_timestamp())
                  and coalesce((select g.state = 'open' and g.holds = 0 and g.decider <= p_decider
                                from run_gates g where g.run_id = e.run_id), true)
                order by e.turn, e.created limit least(p_room - f.rank + 1, f.most - f.together)) w) n
        where n.most is null or n.after <= n.most or n.after = n.size
        order by n.turn, n.created limit p_room
    ), picked as materialized (
        select e.ctid as place, e.size, e.turn, e.created from effects e
        where e.ctid = any (array(select n.place from next n)) and e.worker is null and not e.shut
        for update skip locked
    ), fitting as (
        select p.place, sum(p.size) over (order by p.turn, p.created) - p.size as before from picked p
    )
    update effects e
    set worker = p_worker, epoch = e.epoch + 1
    where e.ctid = any (array(select f.place from fitting f where f.before < p_room))
    returning e.*
$$;

-- Claim effects of a lane, of each run as long as it takes fewer than p_most places (null: without a limit), and of
-- each workspace as long as its samples in flight stay within its limit. An effect that is larger than that limit
-- is claimed when the workspace has nothing else in flight.
create function claim_for_runs(
    p_worker text, p_lane text, p_consumers text[], p_room integer, p_most integer, p_samples bigint
)
returns setof effects language sql
set enable_seqscan = off set enable_bitmapscan = off as $$
    with recursive runs (run_id) as (
        (select e.run_id from effects e order by e.run_id limit 1)
        union all
        select (select e.run_id from effects e where e.run_id > r.run_id order by e.run_id limit 1)
        from runs r where r.run_id is not null
    ), held as materialized (
        select e.run_id, sum(e.size) as places from effects e
        where e.lane = p_lane and e.worker is not null group by e.run_id
    ), taken as materialized (
        select g.workspace, sum(h.places) as places from held h join run_gates g on g.run_id = h.run_id
        where g.workspace is not null group by g.workspace
    ), free as materialized (
        select r.run_id, g.workspace, coalesce(h.places, 0) as places, coalesce(t.places, 0) as together, l.most
        from runs r
        left join run_gates g on g.run_id = r.run_id
        left join held h on h.run_id = r.run_id
        left join taken t on t.workspace = g.workspace
        cross join lateral (
            select case when p_lane = 'generate' then sample_limit(g.workspace, p_samples) end as most) l
        where r.run_id is not null
          and coalesce(g.state = 'open' and g.holds = 0 and g.decider <= (
                  select v.decider from workers v where v.id = p_worker), true)
          and (p_most is null or coalesce(h.places, 0) < p_most)
          and (l.most is null or coalesce(t.places, 0) < l.most)
    ), waiting as (
        select w.*, f.workspace, f.together, f.most,
               f.places + sum(w.size) over (partition by f.run_id order by w.turn, w.created) - w.size as before
        from free f
        cross join lateral (
            select c.id, c.turn, c.created, c.size from effects c
            where c.run_id = f.run_id and c.lane = p_lane and c.consumer = any (p_consumers)
              and c.worker is null and not c.shut and not c.later
              and c.due_at <= (select clock_timestamp())
            order by c.turn limit least(p_room, p_most, f.most - f.together)::bigint) w
    ), next as materialized (
        select n.id from (
            select w.*, w.together + sum(w.size) over (partition by w.workspace order by w.turn, w.created) as after
            from waiting w where p_most is null or w.before < p_most
        ) n
        where n.most is null or n.after <= n.most or n.after = n.size
        order by n.turn, n.created limit p_room
    ), picked as materialized (
        select c.id, c.size, c.turn, c.created from effects c
        where c.id in (select n.id from next n) for update skip locked
    ), fitting as (
        select p.id, sum(p.size) over (order by p.turn, p.created) - p.size as before from picked p
    )
    update effects e
    set worker = p_worker, epoch = e.epoch + 1
    from fitting f where e.id = f.id and f.before < p_room
    returning e.*
$$;

-- Claim effects of a lane for its spare places, of which p_room are left: of runs that hold at most p_few places of this
-- worker with them, among the next 64 of each consumer. An effect is claimed only if all its places are left. A run that
-- has just begun is among the 64, because its turns begin with the turn of the lane. `lane || ''` keeps the planner
-- from the index of what all workers hold of a lane.
create function claim_spare(
    p_worker text, p_lane text, p_consumers text[], p_room integer, p_few integer
)
returns setof effects language sql
set enable_seqscan = off set enable_bitmapscan = off as $$
    with own as materialized (
        select w.decider from workers w where w.id = p_worker and w.expires_at > clock_timestamp()
    ), heads as materialized (
        select c.* from own o cross join unnest(p_consumers) as n (consumer) cross join lateral (
            select e.ctid as place, e.run_id, e.size, e.turn, e.created from effects e
            where e.worker is null and not e.shut and not e.later
              and e.lane = p_lane and e.consumer = n.consumer
              and e.due_at <= (select clock_timestamp())
              and coalesce((select g.state = 'open' and g.holds = 0 and g.decider <= o.decider
                            from run_gates g where g.run_id = e.run_id), true)
            order by e.turn, e.created limit 64) c
    ), held as materialized (
        select e.run_id, sum(e.size) as places from effects e
        where e.worker = p_worker and e.lane || '' = p_lane group by e.run_id
    ), few as (
        select n.* from (
            select c.*, coalesce(h.places, 0)
                        + sum(c.size) over (partition by c.run_id order by c.turn, c.created) as of_run
            from heads c left join held h on h.run_id = c.run_id) n
        where n.of_run <= p_few
    ), next as materialized (
        select f.place from (
            select f.place, sum(f.size) over (order by f.turn, f.created) as together from few f) f
        where f.together <= p_room
    ), picked as materialized (
        select e.ctid as place from effects e
        where e.ctid = any (array(select n.place from next n)) and e.worker is null and not e.shut
        for update skip locked
    )
    update effects e
    set worker = p_worker, epoch = e.epoch + 1
    where e.ctid = any (array(select p.place from picked p))
    returning e.*
$$;

-- Claim due effects, of each lane as long as a place of p_room is left (an effect takes `size` places): the
-- worker's lease is live, the gate is open, the run is not held and needs no newer decider version, and no other
-- worker with a live lease holds them. Effects that this worker already holds are not claimed again, even if its lease ran out meanwhile. What dead
-- workers held is given back first. It keeps its turn, and so does what was to be tried again later and is due now.
-- Of several queues (one per lane and consumer) the one whose head has the smallest turn goes first.
--
-- p_most has, for each lane, how many places one run may take of it in all workers, or null. p_samples is how many
-- samples in flight a workspace may have that has no such quota of its own, or null. With such a limit the runs (or
-- the workspaces) are asked one by one, because an index scan in the order of turns would meet all effects of a run
-- that is at its limit.
-- Such claims of a lane exclude each other, so that two of them never fill the same place.
--
-- The settings and the subqueries fix the plans, because a session keeps the plan that it made when the table was
-- empty. `(select clock_timestamp())` is evaluated once, after the snapshot, so that an index can compare with it
-- and nothing that the snapshot shows is taken to lie in the future. What was picked is locked, so it is updated where
-- it lies in the table, without another look into an index.
create function claim_within(
    p_worker text, p_lanes text[], p_consumers text[], p_room integer[], p_most integer[],
    p_samples bigint
)
returns setof effects language plpgsql
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    dead text;
    queue record;
    taken effects;
    own_decider integer;
    limits_samples boolean := p_samples is not null or exists (
        select from workspace_quotas q where q.name = 'samples_in_flight' and q.most is not null);
begin
    select w.decider into own_decider from workers w
    where w.id = p_worker and w.expires_at > clock_timestamp();
    if not found then
        return;
    end if;
    perform pg_advisory_xact_lock(hashtext('headrace run limits'), hashtext(l.lane))
    from (select p.lane from unnest(p_lanes, p_most) as p (lane, most)
          where p.most is not null or p.lane = 'generate' and limits_samples order by p.lane) l;
    for dead in
        with recursive holders (name) as (
            (select e.worker from effects e where e.worker is not null order by e.worker limit 1)
            union all
            select (select e.worker from effects e where e.worker > h.name order by e.worker limit 1)
            from holders h where h.name is not null
        )
        select h.name from holders h
        where h.name <> p_worker
          and not exists (select from workers w
                          where w.id = h.name and w.expires_at > clock_timestamp())
    loop
        perform give_back_effects(dead);
    end loop;
    update effects e set later = false
    where e.id in (select c.id from effects c
                   where c.worker is null and not c.shut and c.later
                     and c.lane = any (p_lanes) and c.consumer = any (p_consumers)
                     and c.due_at <= (select clock_timestamp())
                   limit 1000 for update skip locked);
    for queue in
        select q.n, q.lane, q.consumer
        from (select l.lane, l.n, c.consumer
              from unnest(p_lanes) with ordinality as l (lane, n)
              cross join unnest(p_consumers) as c (consumer)) q
        cross join lateral (
            select e.turn, e.created from effects e
            where e.worker is null and not e.shut and not e.later
              and e.lane = q.lane and e.consumer = q.consumer
              and e.due_at <= (select clock_timestamp())
            order by e.turn, e.created limit 1
        ) head
        order by head.turn, head.created
    loop
        continue when p_room[queue.n] <= 0;
        if p_most[queue.n] is not null then
            for taken in
                select * from claim_for_runs(
                    p_worker, queue.lane, p_consumers, p_room[queue.n], p_most[queue.n], p_samples)
            loop
                return next taken;
                p_room[queue.n] := p_room[queue.n] - taken.size;
            end loop;
            continue;
        end if;
        if queue.lane = 'generate' and limits_samples then
            for taken in
                select * from claim_samples(
                    p_worker, own_decider, queue.consumer, p_room[queue.n], p_samples)
            loop
                return next taken;
                p_room[queue.n] := p_room[queue.n] - taken.size;
            end loop;
            continue;
        end if;
        for taken in
            with picked as materialized (
                select c.ctid as place, c.size, c.turn, c.created from effects c
                where c.worker is null and not c.shut and not c.later
                  and c.lane = queue.lane and c.consumer = queue.consumer
                  and c.due_at <= (select clock_timestamp())
                  and coalesce((select g.state = 'open' and g.holds = 0 and g.decider <= own_decider
                                from run_gates g where g.run_id = c.run_id), true)
                order by c.turn, c.created
                limit p_room[queue.n]
                for update skip locked
            ), fitting as (
                select p.place, sum(p.size) over (order by p.turn, p.created) - p.size as before from picked p
            )
            update effects e
            set worker = p_worker, epoch = e.epoch + 1
            where e.ctid = any (array(select f.place from fitting f where f.before < p_room[queue.n]))
            returning e.*
        loop
            return next taken;
            p_room[queue.n] := p_room[queue.n] - taken.size;
        end loop;
    end loop;
end $$;

-- Claim under the generation that the worker believes in: raises HR003 when that one is over. It takes an advisory
-- lock and not a row lock, because a claim that finds nothing must take no transaction id, and a lease is renewed
-- meanwhile.
create function claim_in_turn(
    p_worker text, p_lanes text[], p_consumers text[], p_room integer[], p_generation integer, p_most integer[],
    p_samples bigint
) returns setof effects language plpgsql as $$
declare
    known integer;
begin
    perform pg_advisory_xact_lock_shared(hashtext('headrace claims'), hashtext(p_worker));
    select w.generation into known from workers w
    where w.id = p_worker and w.expires_at > clock_timestamp();
    if not found then
        return;
    end if;
    if known <> p_generation then
        raise exception 'generation % is over', p_generation using errcode = 'HR003';
    end if;
    return query select * from claim_within(p_worker, p_lanes, p_consumers, p_room, p_most, p_samples);
end $$;

-- The same, and then for the p_spare spare places of a lane, of which -p_room are taken when its other places are.
-- A lane with a limit has none.
create function claim_in_turn(
    p_worker text, p_lanes text[], p_consumers text[], p_room integer[], p_generation integer, p_most integer[],
    p_samples bigint, p_spare integer[]
) returns setof effects language plpgsql as $$
declare
    taken effects;
begin
    for taken in
        select * from claim_in_turn(p_worker, p_lanes, p_consumers, p_room, p_generation, p_most, p_samples)
    loop
        return next taken;
        p_room[array_position(p_lanes, taken.lane)] := p_room[array_position(p_lanes, taken.lane)] - taken.size;
    end loop;
    if p_samples is not null or exists (
            select from workspace_quotas q where q.name = 'samples_in_flight' and q.most is not null) then
        return;
    end if;
    return query select found.* from unnest(p_lanes, p_room, p_spare, p_most) as l (lane, room, spare, most)
        cross join lateral claim_spare(p_worker, l.lane, p_consumers, l.spare + least(l.room, 0), l.spare) found
        where l.spare + least(l.room, 0) > 0 and l.most is null;
end $$;

-- The same without limits of runs or workspaces, for processes of versions before, which still run during an upgrade.
create function claim_in_turn(p_worker text, p_lanes text[], p_consumers text[], p_room integer[])
returns setof effects language sql as $$
    select * from claim_within(p_worker, p_lanes, p_consumers, p_room, null, null)
$$;
create function claim_in_turn(
    p_worker text, p_lanes text[], p_consumers text[], p_room integer[], p_generation integer
) returns setof effects language sql as $$
    select * from claim_in_turn(p_worker, p_lanes, p_consumers, p_room, p_generation, null, null)
$$;
create function claim_in_turn(
    p_worker text, p_lanes text[], p_consumers text[], p_room integer[], p_generation integer, p_most integer[]
) returns setof effects language sql as $$
    select * from claim_in_turn(p_worker, p_lanes, p_consumers, p_room, p_generation, p_most, null)
$$;

-- What processes of the version before call, which still run during an upgrade. They hold one number of effects of
-- any lane.
create function claim_effects(p_worker text, p_lanes text[], p_consumers text[], p_limit integer)
returns setof effects language sql as $$
    select * from claim_in_turn(p_worker, p_lanes, p_consumers, array_fill(p_limit, array[cardinality(p_lanes)]))
$$;
create function claim_effects(
    p_worker text, p_lanes text[], p_consumers text[], p_limit integer, p_generation integer
) returns setof effects language sql as $$
    select * from claim_in_turn(
        p_worker, p_lanes, p_consumers, array_fill(p_limit, array[cardinality(p_lanes)]), p_generation)
$$;

-- Give back the effects that a worker holds beyond p_keep, and raise its generation. Returns the new generation,
-- or null with nothing changed when the worker has another one already. The lock waits for claims of this worker
-- that are under way, and the second statement sees what they claimed; a single statement would have an older
-- snapshot.
create function disown_effects(p_worker text, p_generation integer, p_keep uuid[])
returns integer language plpgsql as $$
declare
    raised integer;
begin
    perform pg_advisory_xact_lock(hashtext('headrace claims'), hashtext(p_worker));
    update workers w set generation = w.generation + 1
    where w.id = p_worker and w.generation = p_generation
    returning w.generation into raised;
    if found then
        update effects e set worker = null where e.worker = p_worker and e.id <> all (p_keep);
    end if;
    return raised;
end $$;


-- == The horizon of the log ===============================================================================

-- The log's horizon without the writers of other databases. The xmin of a snapshot covers the whole server: a
-- transaction that stays open in another database would hold our log back for as long as it likes.
--
-- $1 is the snapshot of the statement that reads the log. A transaction that it saw in progress is left out only
-- where it is known to belong to another database; one that ended meanwhile, or is not shown, counts. Sessions are
-- looked up after the snapshot was taken: a session that is shown in the place of one that has just ended has a
-- transaction id that the snapshot does not hold. That is why the statistics that an earlier statement of this
-- transaction has read are dropped first. "security definer", because the sessions of other roles are hidden from
-- the role of processes.
create function own_horizon(pg_snapshot) returns xid8
language plpgsql stable security definer set search_path = pg_catalog as $$
declare
    here oid := (select oid from pg_database where datname = current_database());
    oldest xid8;
begin
    perform pg_stat_clear_snapshot();
    with foreign_writers as materialized (
        select backend_xid as writer from pg_stat_get_activity(null)
        where backend_xid is not null and datid <> here
        union all
        select transaction from pg_prepared_xact() where dbid <> here)
    select running into oldest from pg_snapshot_xip($1) running
    where running::xid not in (select writer from foreign_writers)
    order by running limit 1;
    return coalesce(oldest, pg_snapshot_xmax($1));
end $$;

-- Who holds the horizon back, oldest first: transactions of this database that write, and prepared ones. `pid` is
-- null for a prepared transaction; its `name` is the one to commit it or roll it back by.
create function horizon_holders()
returns table (pid integer, name text, username text, application text, address text, since timestamptz)
language sql stable security definer set search_path = pg_catalog as $$
    select a.pid, null::text, a.usename::text, nullif(a.application_name, ''), host(a.client_addr),
           a.xact_start
    from pg_stat_activity a where a.backend_xid is not null and a.datname = current_database()
    union all
    select null, p.gid, p.owner::text, null, null, p.prepared
    from pg_prepared_xacts p where p.database = current_database()
    order by 6
$$;

-- Since when, in seconds. A transaction that only reads has no id that an event's could be compared with, and
-- holds nothing back.
create function horizon_age_s() returns double precision
language sql security definer set search_path = pg_catalog as $$
    select extract(epoch from clock_timestamp() - min(since))::float8
    from (select xact_start as since from pg_stat_activity
          where backend_xid is not null and datname = current_database()
          union all
          select prepared from pg_prepared_xacts where database = current_database()) as writing
$$;


-- == The bus ==============================================================================================

-- How far the relay has published the log to a broker, and to which one. `ends` are the offsets that the broker
-- acknowledged, by `topic/partition`. One row, moved by the session that holds the relay's lock; `seen_at` is when
-- the broker last answered.
create table relay (
    name     text primary key,
    cluster  text not null,
    ends     json not null,
    xid      xid8 not null,
    position bigint not null,
    seen_at  timestamptz not null default clock_timestamp()
);

-- Per consumer group of the broker: how many records it has not acknowledged, as the relay saw it.
create table bus_lag (
    consumers text primary key,
    records   bigint not null,
    seen_at   timestamptz not null default clock_timestamp()
);

-- Records on a bus that no consumer could use, by reason. They are counted, because there may be many.
create table bus_skips (
    reason  text primary key,
    count   bigint not null,
    last_at timestamptz not null default clock_timestamp()
);


-- == The read model =======================================================================================

-- What the API and the command line read. All of it follows from the log, and a rebuild makes it again. JSON is kept
-- as text, because no query here looks inside it.

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
    last_at        timestamptz,
    archived_at    timestamptz,
    restored_at    timestamptz,
    creator        text,
    parent         text,
    parent_step    integer
) with (fillfactor = 50);
create index runs_name on runs (name);
create index runs_recent on runs (created_at desc, run);
create index runs_by_workspace on runs (workspace, created_at desc, run);
create index runs_present on runs (workspace) where archived_at is null;
create index runs_forks on runs (parent, created_at, run) where parent is not null;

-- The tags and the note that people gave to a run. They do not follow from the log.
create table run_notes (
    run        text primary key,
    tags       text[] not null default '{}',
    note       text not null default '',
    changed_by text,
    changed_at timestamptz not null default clock_timestamp()
);
create index run_notes_tags on run_notes using gin (tags);

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
    judgements  text,
    attempts    text,
    primary key (owner, purpose, step, slot, replacement)
);

-- What each event says that its work cost. A row per event, so that nothing counts twice, whatever is projected again.
-- `run` is the run or the evaluation that the event is about, and `owner` the same or the run of a validation. Tokens
-- are those that the policy generated, that a step trained on, and that a step dropped.
create table costs (
    event        text primary key,
    run          text not null,
    owner        text not null,
    step         integer,
    sample       text,
    effect       text,
    device       text,
    device_s     double precision not null default 0,
    wasted_s     double precision not null default 0,
    sampled      bigint not null default 0,
    trained      bigint not null default 0,
    discarded    bigint not null default 0,
    calls_usd    double precision not null default 0,
    calls_tokens bigint not null default 0,
    stored_bytes bigint not null default 0,
    at           timestamptz not null
);
create index costs_by_owner on costs (owner, step);
create index costs_by_time on costs (at);

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
    created_at timestamptz not null,
    workspace  text,
    organisation text,
    version    integer not null default 1,
    series     text
);
create index datasets_name on datasets (name);
create index datasets_by_series on datasets (series, version) where series is not null;

-- Published versions of capabilities, tasks and models. `precedence` sorts as the versions do.
create table published_artifacts (
    artifact     text primary key,
    organisation text not null,
    kind         text not null,
    name         text not null,
    semver       text not null,
    precedence   text collate "C" not null,
    is_prerelease boolean not null,
    sha256       text not null,
    file_size    bigint not null,
    num_files    integer not null,
    unpacked_bytes bigint not null,
    summary      text not null,
    publisher    text,
    created_at   timestamptz not null
);
create unique index published_artifacts_by_name
    on published_artifacts (organisation, kind, name, precedence desc);

create table workspaces (
    workspace  text primary key,
    name       text not null,
    url        text not null,
    status     text not null default 'pending',
    commit_sha text,
    rollouts   text not null default '[]',
    error      text,
    created_at timestamptz not null,
    updated_at timestamptz,
    forge      text,
    refs_digest text,
    refs_error text,
    refs_at    timestamptz,
    default_branch text
);
create index workspaces_name on workspaces (name);

-- What a forge delivered, or what made sync look, newest last.
create table deliveries (
    workspace text not null,
    event     text not null,
    kind      text not null,
    forge     text,
    delivery  text,
    ref       text,
    before    text,
    after     text,
    forced    boolean not null default false,
    pusher    text,
    at        timestamptz not null,
    primary key (workspace, event)
);
create index deliveries_by_time on deliveries (workspace, at desc);

-- Every move of a ref of a workspace's repository. `push` is `<workspace>.<number>`. `reason` says why it
-- led to no run, and `error` what is wrong with its commit.
create table pushes (
    push      text primary key,
    workspace text not null,
    number    bigint not null,
    ref       text not null,
    before    text,
    after     text,
    baseline  boolean not null default false,
    examined  boolean not null default false,
    reason    text,
    error     text,
    at        timestamptz not null
);
create index pushes_by_number on pushes (workspace, number desc);
create index pushes_by_commit on pushes (workspace, ref, after);
create index pushes_by_ref on pushes (workspace, ref, number) where after is not null;

-- What became of each trigger that a push matched: one row for each run that was, or would have been.
-- `commit_state` and `commit_text` are the status that its commit shows.
create table triggered_runs (
    run       text primary key,
    push      text not null,
    workspace text not null,
    trigger   integer not null,
    config    text not null,
    run_name  text,
    outcome   text not null,
    detail    text,
    commit_state text,
    commit_text  text
);
create index triggered_runs_by_push on triggered_runs (push);

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
    completed_at timestamptz,
    workspace    text
);
create index evaluations_name on evaluations (name);
create index evaluations_recent on evaluations (created_at desc, evaluation) where run is null;

create table dead_letters (
    letter       text primary key,
    version      integer not null,
    consumer     text not null,
    message_type text not null,
    about        text not null,
    cause        text not null,
    pauses       boolean not null,
    created_at   timestamptz not null,
    redriven_at  timestamptz
);
create index dead_letters_recent on dead_letters (created_at desc, letter);
create index dead_letters_waiting on dead_letters (about) where pauses and redriven_at is null;

-- Events that a projection could not turn into rows. A row is written in the commit that moves the projection's cursor
-- past the event, and a rebuild of the projection deletes all of its rows.
create table skipped_events (
    projection text not null,
    event      text not null,
    run        text not null,
    event_type text not null,
    stream     text not null,
    version    integer not null,
    xid        bigint not null,
    position   bigint not null,
    error      text not null,
    at         timestamptz not null,
    primary key (projection, event)
);


-- Behind the filters of queries the database itself shows only rows of the workspaces that the sender of a request
-- may see (`infra/spine/postgres/row_security.py`). A process that sets no `headrace.visible` sees all rows, and so do
-- the owner of the tables and backups.
create function shown_workspaces() returns text[] language sql stable as $$
    select nullif(current_setting('headrace.visible', true), '')::text[]
$$;

alter table runs enable row level security;
create policy visible_workspaces on runs using (
    (select shown_workspaces()) is null or workspace = any ((select shown_workspaces())::text[]));
alter table workspaces enable row level security;
create policy visible_workspaces on workspaces using (
    (select shown_workspaces()) is null or workspace = any ((select shown_workspaces())::text[]));
alter table deliveries enable row level security;
create policy visible_workspaces on deliveries using (
    (select shown_workspaces()) is null or workspace = any ((select shown_workspaces())::text[]));
alter table pushes enable row level security;
create policy visible_workspaces on pushes using (
    (select shown_workspaces()) is null or workspace = any ((select shown_workspaces())::text[]));
alter table triggered_runs enable row level security;
create policy visible_workspaces on triggered_runs using (
    (select shown_workspaces()) is null or workspace = any ((select shown_workspaces())::text[]));

-- A validation has the workspace of its run.
alter table evaluations enable row level security;
create policy visible_workspaces on evaluations using (
    (select shown_workspaces()) is null or workspace = any ((select shown_workspaces())::text[])
    or workspace is null and run is not null and exists (select from runs r where r.run = evaluations.run));

-- A cost is seen by those who see the run or the evaluation that paid it.
alter table costs enable row level security;
create policy visible_workspaces on costs using (
    (select shown_workspaces()) is null or owner in (select r.run from runs r)
    or owner in (select v.evaluation from evaluations v));


-- == What edges keep ======================================================================================

-- Not in the log, and not rebuilt from it.

-- Names that were reserved before anything is appended under them. `scope` is where a name is unique: the id of a
-- workspace or of an organisation, and empty for what belongs to none.
create table names (
    kind       text not null,
    name       text not null,
    id         text not null,
    created_at timestamptz not null default clock_timestamp(),
    scope      text not null default '',
    primary key (kind, name, scope)
);
create index names_by_id on names (kind, id);
create index names_by_scope on names (kind, scope);

-- Uploads that are not datasets yet, or never became one.
create table dataset_uploads (
    id          text primary key,
    name        text not null,
    file_name   text not null,
    status      text not null,
    error       text,
    created_at  timestamptz not null default clock_timestamp(),
    workspace   text,
    uploader    text,
    rejected_at timestamptz,
    issues      text,
    organisation text,
    file_size   bigint,
    overwrites  boolean not null default false,
    mapping     text,
    sha256      text,
    series      text,
    dataset     text,
    attempts    integer not null default 0,
    claimed_until timestamptz
);

-- Of the uploads of one new name, one is checked at a time.
create unique index dataset_uploads_processing on dataset_uploads (series)
    where status = 'processing' and file_size is not null and not overwrites;
create index dataset_uploads_to_check on dataset_uploads (claimed_until nulls first)
    where status = 'processing' and file_size is not null;

create table dataset_upload_lines (
    upload  text not null references dataset_uploads on delete cascade,
    line    integer not null,
    at      timestamptz not null default clock_timestamp(),
    level   text not null,
    step    text not null,
    message text not null,
    primary key (upload, line)
);

-- Uploads in parts: what is expected, and the parts that have arrived. Their bytes are blobs below `uploads/`. A
-- dataset that is uploaded in stages is checked after its upload is complete, by any control process.
create table uploads (
    id         text primary key,
    purpose    text not null,
    size       bigint not null,
    part_size  bigint not null,
    status     text not null default 'open' check (status in ('open', 'complete', 'closed')),
    actor      text not null,
    workspace  text,
    organisation text,
    created_at timestamptz not null default clock_timestamp()
);

create table upload_parts (
    upload text not null references uploads on delete cascade,
    part   integer not null,
    etag   text not null,
    uri    text not null,
    primary key (upload, part)
);

-- Imports of evaluations that ran elsewhere, while their files arrive: which files there are, and the upload of each.
-- `number` counts the imports of an evaluation, and `claimed_until` lets one of them be finalized at a time.
create table evaluation_imports (
    id            text primary key,
    evaluation    text not null,
    number        integer not null,
    workspace     text not null,
    content       text not null,
    claimed_until timestamptz,
    created_at    timestamptz not null default clock_timestamp()
);
create index evaluation_imports_by_evaluation on evaluation_imports (evaluation);

create table evaluation_import_files (
    import text not null references evaluation_imports on delete cascade,
    path   text not null,
    upload text not null,
    primary key (import, path)
);

alter table evaluation_imports enable row level security;
create policy visible_workspaces on evaluation_imports using (
    (select shown_workspaces()) is null or workspace = any ((select shown_workspaces())::text[]));

create table url_keys (
    id         integer primary key check (id = 1),
    sealed     bytea not null,
    created_at timestamptz not null default clock_timestamp()
);

-- Where the device workers that are alive answer requests of the API.
create table worker_doors (
    worker     text primary key,
    url        text not null,
    key        text not null default '',
    updated_at timestamptz not null default clock_timestamp()
);

-- Grants for one chat each, by their SHA-256. The key above is of earlier versions.
create table chat_grants (
    sha256     bytea primary key,
    worker     text not null,
    expires_at timestamptz not null
);

-- Deployments: the checkpoint that each name of a workspace serves (`served`, as JSON), and the one that is being
-- loaded (`pending`), by the request `request`.
create table deployments (
    deployment   text not null,
    workspace    text,
    status       text not null default 'inactive',
    number       bigint,
    served       text,
    pending      text not null default '',
    error        text not null default '',
    requested_by text,
    created_at   timestamptz not null,
    updated_at   timestamptz,
    deployed_at  timestamptz,
    request      text not null default '',
    key          text generated always as (coalesce(workspace || '/', '') || deployment) stored not null,
    primary key (key)
);
create index deployments_by_name on deployments (deployment);
alter table deployments enable row level security;
create policy visible_workspaces on deployments using (
    (select shown_workspaces()) is null or workspace = any ((select shown_workspaces())::text[]));

-- The requests and tokens that each API key used, by model (BASE:WORKSPACE/NAME for that of a workspace) and day; what
-- was used long ago is added up under the day `-infinity`. This does not follow from the log.
create table inference_usage (
    api_key           text not null,
    model             text not null,
    day               date not null default (clock_timestamp() at time zone 'utc')::date,
    requests          bigint not null default 0,
    prompt_tokens     bigint not null default 0,
    completion_tokens bigint not null default 0,
    last_at           timestamptz not null default clock_timestamp(),
    primary key (api_key, model, day)
);
create index inference_usage_by_day on inference_usage (day);

-- Uploads of checkpoints to a model hub: what was asked for, and what became of it.
create table hub_uploads (
    upload       text primary key,
    run          text not null,
    step         integer not null,
    repository   text not null,
    form         text not null,
    visibility   text not null,
    status       text not null default 'requested',
    url          text,
    revision     text,
    error        text,
    requested_by text,
    created_at   timestamptz not null,
    updated_at   timestamptz
);
create index hub_uploads_by_run on hub_uploads (run, step, created_at);

-- Where processes serve deployments, and the keys by which control processes ask them, by their SHA-256.
create table serving_doors (
    worker     text primary key,
    url        text not null,
    updated_at timestamptz not null default clock_timestamp()
);

create table serving_grants (
    sha256     bytea primary key,
    worker     text not null,
    expires_at timestamptz not null
);

-- Sign-ins of browsers. The database holds only the SHA-256 of a session's cookie and of a one-time code.
-- `api_key_sha256` is that of the API key that signed in, so a session ends with its key.
create table browser_sessions (
    sha256         bytea primary key,
    api_key        text not null,
    api_key_sha256 bytea not null,
    created_at     timestamptz not null default clock_timestamp(),
    expires_at     timestamptz not null
);

-- Links that show one run to whoever has them. Only the SHA-256 of the key of a link is here.
create table run_shares (
    share      text primary key,
    sha256     bytea not null unique,
    run        text not null,
    created_by text not null,
    created_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null
);
create index run_shares_run on run_shares (run);

-- Alerts about runs, once for each kind and channel, until they are delivered.
create table alerts (
    run        text not null,
    kind       text not null,
    channel    text not null,
    content    text not null,
    attempts   integer not null default 0,
    due_at     timestamptz not null default clock_timestamp(),
    sent_at    timestamptz,
    error      text,
    created_at timestamptz not null default clock_timestamp(),
    primary key (run, kind, channel)
);
create index alerts_due on alerts (due_at) where sent_at is null;
create index alerts_told on alerts (coalesce(sent_at, created_at))
    where channel <> '' and (sent_at is not null or due_at = 'infinity');

-- Where the members of a workspace let alerts about its runs go, besides the channels of the operator. `address` and
-- `secret` are sealed. Their id is the channel of their alerts.
create table alert_targets (
    id         text primary key,
    workspace  text not null,
    medium     text not null check (medium in ('webhook', 'mail')),
    shown      text not null,
    address    bytea not null,
    secret     bytea,
    kinds      text[] not null,
    created_by text not null,
    created_at timestamptz not null default clock_timestamp(),
    error      text
);
create index alert_targets_of_workspace on alert_targets (workspace, created_at);

create table sign_in_codes (
    sha256         bytea primary key,
    api_key        text not null,
    api_key_sha256 bytea not null,
    expires_at     timestamptz not null
);

-- What judges said about samples, before the grades of their group are in the log, so that nothing is asked and paid
-- for twice. And what the judges of a run or evaluation have used. The rows of a run go when its history goes.
create table judgements (
    owner     text not null,
    key       text not null,
    judgement text not null,
    primary key (owner, key)
);

create table judge_usage (
    owner  text primary key,
    calls  bigint not null default 0,
    tokens bigint not null default 0,
    usd    double precision not null default 0
);

-- What an evaluation has used of a provider's model, so that its workers share one bound.
create table provider_usage (
    owner text primary key,
    calls bigint not null default 0,
    usd   double precision not null default 0
);


-- == The installation =====================================================================================

-- Which migrations were applied; `infra/spine/postgres/migrate.py` makes this table before the first of them.
create table migrations (
    name       text primary key,
    checksum   text not null,
    applied_at timestamptz not null default now()
);

-- Which blobs belong to this database: one row, written by the first process that worked on it.
create table installation (
    alone boolean primary key default true check (alone),
    id    text not null,
    blobs text not null,
    place text not null,
    since timestamptz not null default clock_timestamp()
);

-- Where the blobs of this installation have been, as URIs. References name the place that they were written under,
-- and blobs may be moved as a whole or restored somewhere else.
create table blob_places (
    root  text primary key,
    since timestamptz not null default clock_timestamp()
);

-- The cluster whose transaction ids this database holds. In another cluster (a dump was restored there) they mean
-- nothing, and would hide what is appended next: `infra/spine/postgres/restored_dump.py` repairs that.
create table cluster (
    alone             boolean primary key default true check (alone),
    system_identifier bigint not null,
    since             timestamptz not null default clock_timestamp()
);


-- == Retention ============================================================================================

-- The history of an ended run can leave the database, into an archive or for good (docs/retention.md). Processes
-- have no right to delete an event. These functions do it as the owner, each in one transaction that also leaves an
-- event which says what happened, and only for what has ended and was read by every consumer.

-- Runs (and validations of runs) whose events were removed, the small artifacts that those events named, and blobs
-- that are not a run's (contents of datasets) which a removed event named. Their bytes are collected by
-- reachability some time later (`infra/blobs/garbage.py`).
create table removals (
    owner text primary key,
    at    timestamptz not null default clock_timestamp()
);

create function forget_judgements() returns trigger language plpgsql as $$
begin
    delete from judgements j where j.owner = new.owner;
    delete from judge_usage u where u.owner = new.owner;
    delete from provider_usage u where u.owner = new.owner;
    return null;
end $$;
create trigger forget_judgements after insert or update on removals
    for each row execute function forget_judgements();
create table discards (
    sha256 text primary key,
    at     timestamptz not null default clock_timestamp()
);
create table discarded_blobs (
    uri text primary key,
    at  timestamptz not null default clock_timestamp()
);

-- Allow this transaction to delete events up to (p_xid, p_position). Raises HR004 with the reason when a consumer
-- has not read beyond that.
create function begin_removal(p_xid xid8, p_position bigint) returns void language plpgsql as $$
declare
    behind text;
begin
    if not pg_has_role(session_user, 'headrace_worker', 'member') then
        raise exception '% may not act as headrace_worker', session_user using errcode = '42501';
    end if;
    select w.consumer into behind from watermarks w
    where (w.xid, w.position) < (p_xid, p_position) order by w.consumer limit 1;
    if behind is null and not exists (select from watermarks w where w.consumer = 'project') then
        behind := 'project';
    end if;
    if behind is not null then
        raise exception 'BEHIND %', behind using errcode = 'HR004';
    end if;
    perform set_config('headrace.removes', pg_current_xact_id()::text, true);
end $$;
revoke execute on function begin_removal(xid8, bigint) from public;

-- Append the event that says what happened, as version p_version of its stream. The session's setting
-- `headrace.actor` says on whose behalf.
create function leave_notice(
    p_stream text, p_version integer, p_about text,
    t_id uuid, t_type text, t_schema integer, t_data text, t_cause uuid
) returns table (r_position bigint, r_xid xid8, r_time timestamptz) language sql as $$
    update streams set version = p_version where stream = p_stream;
    insert into events (id, stream, version, type, schema_version, data, run_id, causation,
                        correlation, actor)
    values (t_id, p_stream, p_version, t_type, t_schema, t_data::json, p_about, t_cause, t_cause,
            nullif(current_setting('headrace.actor', true), ''))
    returning position, xid, time;
$$;
revoke execute on function leave_notice(text, integer, text, uuid, text, integer, text, uuid) from public;

-- Remove the history of an ended run. An archive (p_whole false) keeps the run's request and checkpoints, with the
-- notice as the second event of its stream; p_events says how many events the archive holds. A deletion (p_whole)
-- keeps only the notice, frees the run's names, and takes its uploads to a hub and its verifications along. The
-- closed gate stays in both cases, and so does the run's own stream, with a version that fits what is in it. Raises
-- HR001 when the log holds other events than were archived.
create function remove_run(
    p_run text, p_whole boolean, p_events bigint,
    t_id uuid, t_type text, t_schema integer, t_data text, t_cause uuid
) returns table (r_position bigint, r_xid xid8, r_time timestamptz) language plpgsql as $$
declare
    own text := 'run-' || p_run;
    owners text[];
    last record;
    removed bigint;
begin
    perform from run_gates g where g.run_id = p_run and g.state = 'closed' for update;
    if not found then
        raise exception 'OPEN' using errcode = 'HR004';
    end if;
    owners := array[p_run] || array(
        select e.data ->> 'evaluation' from events e
        where e.stream = own and e.type = 'rl.evaluation.requested');
    if p_whole then
        owners := owners || array(select h.upload from hub_uploads h where h.run = p_run) || array(
            select e.run_id from events e
            where e.type = 'rl.verification.completed' and is_record(e.type) and e.data ->> 'run' = p_run);
    end if;
    if exists (select from effects f where f.run_id = any (owners)
               or (f.type in ('VerifyRun', 'RegradeGroups', 'CompareGradients')
                   and f.data ->> 'run' = p_run)) then
        raise exception 'WORK' using errcode = 'HR004';
    end if;
    select e.xid, e.position into last from events e where e.run_id = any (owners)
    order by e.xid desc, e.position desc limit 1;
    if not found then
        raise exception '%', own using errcode = 'HR001';
    end if;
    perform begin_removal(last.xid, last.position);
    create temporary table gone on commit drop as
        select e.position, e.xid, e.stream from events e
        where e.run_id = any (owners) and e.stream not like 'dead-letter-%'
          and (p_whole or (e.stream <> 'checkpoint-' || p_run and not (e.stream = own and e.version = 1)));
    analyze gone;
    select count(*) into removed from gone;
    if not p_whole and removed <> p_events then
        raise exception '%', own using errcode = 'HR001';
    end if;
    insert into discards (sha256)
        select distinct m[1] from gone g join events e on e.xid = g.xid and e.position = g.position,
            regexp_matches(e.data::text, '"row:([0-9a-f]{64})"', 'g') m
        on conflict (sha256) do update set at = clock_timestamp();
    delete from events e using gone g where e.xid = g.xid and e.position = g.position;
    delete from streams s where s.stream <> own and s.stream in (select g.stream from gone g);
    delete from snapshots s where s.stream = own or s.stream in (select g.stream from gone g);
    insert into removals (owner) select unnest(owners)
        on conflict (owner) do update set at = clock_timestamp();
    drop table gone;
    if p_whole then
        delete from names n where n.kind = 'run' and n.id = p_run;
    end if;
    return query select * from leave_notice(
        own, case when p_whole then 1 else 2 end, p_run, t_id, t_type, t_schema, t_data, t_cause);
end $$;

-- Remove the notice of an archived run whose events the caller has inserted again in this transaction. Where the
-- database came from another cluster meanwhile, the notice has transaction id 0, and the caller gives the events that
-- id too, because the archived ids mean nothing here. No consumer gets these events again. Raises HR001 when no notice
-- is there, or when the number of events is not p_events.
create function restore_run(
    p_run text, p_events bigint,
    t_id uuid, t_type text, t_schema integer, t_data text, t_cause uuid
) returns table (r_position bigint, r_xid xid8, r_time timestamptz) language plpgsql as $$
declare
    own text := 'run-' || p_run;
    owners text[];
    notice record;
    head integer;
    found_events bigint;
begin
    perform from run_gates g where g.run_id = p_run and g.state = 'closed' for update;
    select e.xid, e.position into notice from events e
    where e.stream = own and e.version = 2 and e.type = 'rl.run.archived';
    if not found then
        raise exception '%', own using errcode = 'HR001';
    end if;
    perform begin_removal(notice.xid, notice.position);
    delete from events e where e.xid = notice.xid and e.position = notice.position;
    owners := array[p_run] || array(
        select e.data ->> 'evaluation' from events e
        where e.stream = own and e.type = 'rl.evaluation.requested');
    select count(*) into found_events from events e
    where e.run_id = any (owners) and e.stream not like 'dead-letter-%'
      and e.stream <> 'checkpoint-' || p_run and not (e.stream = own and e.version = 1);
    if found_events <> p_events then
        raise exception '%', own using errcode = 'HR001';
    end if;
    insert into inbox (consumer, event_id)
        select w.consumer, e.id from watermarks w join events e on (e.xid, e.position) > (w.xid, w.position)
        where w.consumer <> 'project' and e.run_id = any (owners)
        on conflict do nothing;
    insert into streams (stream, version)
        select e.stream, max(e.version) from events e
        where e.run_id = any (owners) and e.stream not like 'dead-letter-%' group by e.stream
        on conflict (stream) do update set version = excluded.version;
    delete from snapshots s where s.stream = own;
    delete from removals r where r.owner = any (owners);
    select s.version into head from streams s where s.stream = own;
    return query select * from leave_notice(
        own, head + 1, p_run, t_id, t_type, t_schema, t_data, t_cause);
end $$;

-- Remove the registration of a dataset: the notice is then the only event of its stream.
create function remove_dataset(
    p_dataset text, p_uris text[],
    t_id uuid, t_type text, t_schema integer, t_data text, t_cause uuid
) returns table (r_position bigint, r_xid xid8, r_time timestamptz) language plpgsql as $$
declare
    own text := 'dataset-' || p_dataset;
    last record;
begin
    perform from streams s where s.stream = own for update;
    select e.xid, e.position, e.type into last from events e where e.stream = own
    order by e.version desc limit 1;
    if not found or last.type <> 'rl.dataset.registered' then
        raise exception '%', own using errcode = 'HR001';
    end if;
    perform begin_removal(last.xid, last.position);
    delete from events e where e.stream = own;
    delete from names n where n.kind = 'dataset' and n.id = p_dataset;
    delete from dataset_uploads u where u.id = p_dataset;
    insert into discarded_blobs (uri) select unnest(p_uris)
        on conflict (uri) do update set at = clock_timestamp();
    return query select * from leave_notice(
        own, 1, p_dataset, t_id, t_type, t_schema, t_data, t_cause);
end $$;

-- Remove a version of a dataset: the notice is then the only event of its stream. With its last version the dataset's
-- name is free.
create function remove_dataset_version(
    p_dataset text, p_series text, p_is_last boolean, p_uris text[],
    t_id uuid, t_type text, t_schema integer, t_data text, t_cause uuid
) returns table (r_position bigint, r_xid xid8, r_time timestamptz) language plpgsql as $$
declare
    own text := 'dataset-' || p_dataset;
    last record;
begin
    perform from streams s where s.stream = own for update;
    select e.xid, e.position, e.type into last from events e where e.stream = own
    order by e.version desc limit 1;
    if not found or last.type <> 'rl.dataset.registered' then
        raise exception '%', own using errcode = 'HR001';
    end if;
    perform begin_removal(last.xid, last.position);
    delete from events e where e.stream = own;
    if p_is_last then
        delete from names n where n.kind = 'dataset' and n.id = p_series;
    end if;
    delete from dataset_uploads u where u.id = p_dataset or u.dataset = p_dataset;
    insert into discarded_blobs (uri) select unnest(p_uris)
        on conflict (uri) do update set at = clock_timestamp();
    return query select * from leave_notice(
        own, 1, p_dataset, t_id, t_type, t_schema, t_data, t_cause);
end $$;

-- Remove a version of an artifact: the notice is then the only event of its stream. Raises HR004 when another event
-- names its bytes.
create function remove_artifact(
    p_artifact text, p_uris text[],
    t_id uuid, t_type text, t_schema integer, t_data text, t_cause uuid
) returns table (r_position bigint, r_xid xid8, r_time timestamptz) language plpgsql
set enable_seqscan = off set enable_indexscan = off as $$
declare
    own text := 'artifact-' || p_artifact;
    last record;
    used text;
begin
    perform from streams s where s.stream = own for update;
    select e.xid, e.position, e.type into last from events e where e.stream = own
    order by e.version desc limit 1;
    if not found or last.type <> 'rl.artifact.published' then
        raise exception '%', own using errcode = 'HR001';
    end if;
    select e.stream into used from unnest(p_uris) as u (uri) join events e
        on e.data::text like '%"uri"%' and named_hashes(e.data) @> array[hashtextextended(u.uri, 0)]
    where e.stream <> own limit 1;
    if used is not null then
        raise exception 'USED %', used using errcode = 'HR004';
    end if;
    perform begin_removal(last.xid, last.position);
    delete from events e where e.stream = own;
    insert into discarded_blobs (uri) select unnest(p_uris)
        on conflict (uri) do update set at = clock_timestamp();
    return query select * from leave_notice(
        own, 1, p_artifact, t_id, t_type, t_schema, t_data, t_cause);
end $$;

-- Streams from which old events were removed: versions up to this one may be missing.
create table trimmed_streams (
    stream  text primary key,
    version integer not null
);

-- The events by which old records of a kind are found.
create function record_types(p_kind text) returns text[] language sql immutable as $$
    select case p_kind
        when 'evaluations' then array['rl.evaluation.completed']
        when 'verifications' then array['rl.verification.completed']
        when 'hub_uploads' then array['rl.hub-upload.uploaded', 'rl.hub-upload.failed',
                                      'rl.hub-push.pushed', 'rl.hub-push.failed']
        when 'deliveries' then array['rl.workspace.push-received', 'rl.workspace.hook-pinged',
                                     'rl.workspace.refs-check-requested']
        when 'statuses' then array['rl.status.decided', 'rl.status.posted']
        when 'deployments' then array['rl.model.deploy-requested', 'rl.model.deployed', 'rl.model.deploy-failed',
                                      'rl.model.deploy-skipped', 'rl.model.undeploy-requested',
                                      'rl.model.undeployed']
        when 'dead_letters' then array['rl.dead-letter.redriven']
        when 'pushes' then array['rl.workspace.refs-moved']
        when 'ref_checks' then array['rl.workspace.refs-requested', 'rl.workspace.refs-listed']
        when 'syncs' then array['rl.workspace.commit-requested', 'rl.workspace.pushed',
                                'rl.workspace.packages-chosen', 'rl.workspace.synced', 'rl.workspace.rejected']
        else array[]::text[] end
$$;

-- Whether a run or an evaluation, by its stream, was deleted. An archived one still exists.
create function is_deleted(p_stream text) returns boolean language sql stable as $$
    select not exists (
        select from events e where e.stream = p_stream and e.version = 1 and e.type <> 'rl.run.deleted')
$$;

-- Whether nothing needs to know any more what became of a push: it was examined, it does not count for today, and it
-- triggered no run but those that were skipped, refused or deleted. A run that superseded another one stays as long as
-- that one does, because it ended the other's turn. The newest event of the stream stays.
create function push_is_over(p_workspace text, p_number text) returns boolean language plpgsql stable as $$
declare
    own text := 'trigger-' || p_workspace;
    head integer := (select s.version from streams s where s.stream = own);
    examined events;
    one record;
begin
    select e.* into examined from events e
    where e.stream = own and e.type like 'rl.trigger.%'
      and coalesce(e.data ->> 'run', e.data -> 'push' ->> 'number') = p_number;
    if not found or examined.version = head or examined.data ->> 'day' = (
        select n.data ->> 'day' from events n
        where n.stream = own and n.type = 'rl.trigger.push-examined' and n.data ->> 'day' <> ''
        order by n.version desc limit 1) then
        return false;
    end if;
    for one in
        select t.run, t.outcome from triggered_runs t where t.push = p_workspace || '.' || p_number
    loop
        if one.outcome not in ('skipped', 'refused') and not (
                one.outcome = 'submitted' and is_deleted('run-' || one.run)) then
            return false;
        end if;
        if exists (
            select from events e
            where e.stream = own and e.type like 'rl.trigger.%'
              and coalesce(e.data ->> 'run', e.data -> 'push' ->> 'number') = one.run
              and (e.version = head or e.type = 'rl.trigger.fired' and exists (
                  select from json_array_elements_text(e.data -> 'supersedes') as s (run)
                  join events o on o.stream = own and o.type like 'rl.trigger.%'
                    and coalesce(o.data ->> 'run', o.data -> 'push' ->> 'number') = s.run))
        ) then
            return false;
        end if;
    end loop;
    return true;
end $$;

-- Whether an event of a repository may go. Without it the workspace folds into the same state, but for the numbers of
-- messages that were answered: those were read by all, and are not delivered again. Of each ref the last commit stays,
-- and that it is gone. The first request of a commit made the workspace. What a run or evaluation asked for goes when it is
-- deleted, and the rest when a later event says the same.
create function may_remove_of_repository(p_kind text, p_event events) returns boolean language plpgsql stable as $$
declare
    requester text := p_event.data ->> 'requester';
    -- Earlier releases wrote requests of commits as `rl.workspace.pushed`.
    requests constant text[] := array['rl.workspace.commit-requested', 'rl.workspace.pushed'];
    alike text[] := case when p_event.type = any (requests) then requests else array[p_event.type] end;
begin
    if exists (select from effects f where f.run_id = p_event.run_id) then
        return false;
    end if;
    if p_kind = 'pushes' then
        return not exists (
            select from json_array_elements(p_event.data -> 'moves') as m (move)
            where not exists (
                    select from pushes n
                    where n.workspace = p_event.run_id and n.ref = m.move ->> 'ref'
                      and n.number > (m.move ->> 'number')::bigint and n.after is not null)
               or (not coalesce((p_event.data ->> 'baseline')::boolean, false) and m.move ->> 'after' is not null
                   and not push_is_over(p_event.run_id, m.move ->> 'number')));
    end if;
    if p_event.type = any (array['rl.workspace.refs-requested', 'rl.workspace.refs-listed'] || requests)
       and not exists (
            select from events n
            where n.stream = p_event.stream and n.version > p_event.version and n.type = any (alike)
              and n.type in ('rl.workspace.refs-requested', 'rl.workspace.refs-listed',
                             'rl.workspace.commit-requested', 'rl.workspace.pushed')
              and (n.data ->> 'round')::bigint is not distinct from greatest(
                      (n.data ->> 'round')::bigint, (p_event.data ->> 'round')::bigint)) then
        return false;
    end if;
    if p_event.type = 'rl.workspace.refs-requested' then
        return exists (
            select from events n
            where n.stream = p_event.stream and n.version > p_event.version
              and n.type = 'rl.workspace.refs-listed'
              and (n.data ->> 'round')::bigint >= (p_event.data ->> 'round')::bigint);
    end if;
    if p_event.type = 'rl.workspace.refs-listed' then
        return p_event.data ->> 'error' is not null or exists (
            select from events n
            where n.stream = p_event.stream and n.version > p_event.version
              and n.type = 'rl.workspace.refs-listed' and n.data ->> 'error' is null
              and (n.data ->> 'digest' is not null or p_event.data ->> 'digest' is null)
              and (n.data ->> 'default_branch' is not null or p_event.data ->> 'default_branch' is null));
    end if;
    if p_event.type = any (requests) and not exists (
            select from events n
            where n.stream = p_event.stream and n.version < p_event.version
              and n.type in ('rl.workspace.commit-requested', 'rl.workspace.pushed')) then
        return false;
    end if;
    if requester is not null then
        return is_deleted(requester);
    end if;
    return exists (
        select from events n
        where n.stream = p_event.stream and n.version > p_event.version
          and n.type = 'rl.workspace.synced' and n.data ->> 'requester' is null);
end $$;

-- Whether an event about a deployment may go, because what came later is all that counts.
create function may_remove_of_deployment(p_event events) returns boolean language plpgsql stable as $$
declare
    place text := deployment_scope(p_event.data);
begin
    if place is null then
        -- An event that says only a name may have ended what any workspace had under it, so it stays as long as
        -- anything before it does.
        return exists (
                select from events n
                where n.type in ('rl.model.deployed', 'rl.model.undeployed') and n.data -> 'scope' is null
                  and n.data ->> 'deployment' = p_event.data ->> 'deployment' and n.version > p_event.version)
            and not exists (
                select from events n
                where n.type in ('rl.model.deployed', 'rl.model.deploy-requested')
                  and n.data ->> 'deployment' = p_event.data ->> 'deployment' and n.version < p_event.version);
    end if;
    return exists (
            select from events n
            where n.type in ('rl.model.deployed', 'rl.model.undeployed')
              and n.data ->> 'deployment' = p_event.data ->> 'deployment' and n.version > p_event.version
              and coalesce(deployment_scope(n.data), place) = place)
        and (p_event.type not in ('rl.model.deployed', 'rl.model.deploy-requested') or exists (
            -- A name that serves nothing still shows what it served last, and who asked last.
            select from events n
            where n.type in ('rl.model.deployed', 'rl.model.deploy-requested') and n.type = p_event.type
              and n.data ->> 'deployment' = p_event.data ->> 'deployment' and n.version > p_event.version
              and deployment_scope(n.data) = place));
end $$;

-- Whether the record that is found by this event may go. Evaluations, verifications and uploads to a hub go whole,
-- once they have ended: a validation belongs to its run and goes with it, what was retried has not ended, and a
-- request to stop that came too late changes nothing. Of other streams only events go that a later one makes
-- superfluous: deliveries, what happened in a repository, the statuses of a commit before its newest one, and
-- deployments before those that are served. Without them the stream folds into the same state. The newest event of such a stream stays.
create function may_remove(p_kind text, p_event events) returns boolean language plpgsql stable as $$
begin
    if p_kind in ('evaluations', 'verifications', 'hub_uploads') then
        return (p_kind <> 'evaluations' or p_event.data ->> 'run' is null)
            and not exists (
                select from events n where n.stream = p_event.stream and n.version > p_event.version
                  and n.type not in ('rl.evaluation.stop-requested', 'rl.hub-upload.cancel-requested',
                                     'rl.hub-push.cancel-requested'))
            and not exists (select from effects f where f.run_id = p_event.run_id);
    end if;
    if not exists (select from streams s where s.stream = p_event.stream and s.version > p_event.version) then
        return false;
    end if;
    if p_kind in ('pushes', 'ref_checks', 'syncs') then
        return may_remove_of_repository(p_kind, p_event);
    end if;
    if p_kind = 'statuses' then
        return exists (
            select from events n where n.stream = p_event.stream and n.version > p_event.version
              and n.type = 'rl.status.decided');
    end if;
    if p_kind = 'deployments' then
        return may_remove_of_deployment(p_event);
    end if;
    return true;
end $$;

-- Remove everything of a record that goes whole; returns how many events that were.
create function remove_owner(p_owner text) returns bigint language plpgsql as $$
declare
    last record;
    removed bigint;
begin
    select e.xid, e.position into last from events e where e.run_id = p_owner
    order by e.xid desc, e.position desc limit 1;
    perform begin_removal(last.xid, last.position);
    insert into discards (sha256)
        select distinct m[1] from events e, regexp_matches(e.data::text, '"row:([0-9a-f]{64})"', 'g') m
        where e.run_id = p_owner and e.stream not like 'dead-letter-%'
        on conflict (sha256) do update set at = clock_timestamp();
    -- The log of a run has lines about its uploads to a hub, which earlier releases called pushes.
    delete from log_lines l using events e
    where e.run_id = p_owner and l.run in (p_owner, e.data -> 'upload' ->> 'run', e.data -> 'push' ->> 'run')
      and l.xid = e.xid::text::bigint and l.position = e.position;
    with gone as (
        delete from events e where e.run_id = p_owner and e.stream not like 'dead-letter-%'
        returning e.stream
    ), snapped as (
        delete from snapshots s where s.stream = any (array(select distinct g.stream from gone g))
    ), headless as (
        delete from streams s where s.stream = any (array(select distinct g.stream from gone g))
    )
    select count(*) into removed from gone;
    insert into removals (owner) values (p_owner)
        on conflict (owner) do update set at = clock_timestamp();
    delete from run_gates g where g.run_id = p_owner;
    delete from names n where n.kind = 'evaluation' and n.id = p_owner;
    delete from evaluations v where v.evaluation = p_owner;
    delete from graded_groups g where g.owner = p_owner;
    delete from costs c where c.owner = p_owner;
    delete from metric_points m where m.run = p_owner;
    delete from skipped_events k where k.run = p_owner;
    delete from hub_uploads h where h.upload = p_owner;
    return removed;
end $$;
revoke execute on function remove_owner(text) from public;

-- Remove one event of a stream that goes on, and the rows that follow from it. The snapshot of a workspace is not a
-- run's, so the collector is told of it.
create function remove_event(p_event events) returns void language plpgsql as $$
begin
    perform begin_removal(p_event.xid, p_event.position);
    insert into discards (sha256)
        select distinct m[1] from regexp_matches(p_event.data::text, '"row:([0-9a-f]{64})"', 'g') m
        on conflict (sha256) do update set at = clock_timestamp();
    if p_event.type = 'rl.workspace.synced'
       and p_event.data -> 'snapshot' ->> 'uri' like '%/runs/' || p_event.run_id || '/%' then
        insert into discarded_blobs (uri) values (p_event.data -> 'snapshot' ->> 'uri')
            on conflict (uri) do update set at = clock_timestamp();
    end if;
    delete from deliveries d
    where d.workspace = p_event.data ->> 'workspace' and d.event = p_event.id::text;
    delete from log_lines l
    where l.run in (p_event.run_id, p_event.data -> 'served' ->> 'run', p_event.data ->> 'run',
                    substr(p_event.data ->> 'requester', strpos(p_event.data ->> 'requester', '-') + 1))
      and l.xid = p_event.xid::text::bigint and l.position = p_event.position;
    delete from events e where e.xid = p_event.xid and e.position = p_event.position;
end $$;
revoke execute on function remove_event(events) from public;

-- Remove what became of a push that is over: what its triggers did, and the statuses of its commit, which nothing
-- follows any more. Returns how many events went.
create function remove_push(p_workspace text, p_number text) returns bigint language plpgsql as $$
declare
    own text := 'trigger-' || p_workspace;
    runs text[] := array(select t.run from triggered_runs t where t.push = p_workspace || '.' || p_number);
    shown text[] := array(select 'status-' || s.subject
                          from unnest(runs || (p_workspace || '.' || p_number)) as s (subject));
    one events;
    cut integer := 0;
    removed bigint := 0;
begin
    for one in
        select e.* from events e
        where e.stream = own and e.type like 'rl.trigger.%'
          and coalesce(e.data ->> 'run', e.data -> 'push' ->> 'number') = any (runs || p_number)
        union all
        select e.* from events e where e.stream = any (shown)
    loop
        perform remove_event(one);
        removed := removed + 1;
        if one.stream = own then
            cut := greatest(cut, one.version);
        end if;
    end loop;
    if cut > 0 then
        insert into trimmed_streams as t (stream, version) values (own, cut)
        on conflict (stream) do update set version = greatest(t.version, excluded.version);
    end if;
    delete from streams s where s.stream = any (shown);
    delete from snapshots s where s.stream = any (shown);
    delete from trimmed_streams t where t.stream = any (shown);
    delete from triggered_runs t where t.push = p_workspace || '.' || p_number;
    return removed;
end $$;
revoke execute on function remove_push(text, text) from public;

-- Remove the record that is found by this event, unless another session removes it at this moment, or it may not go.
-- Returns how many events went.
create function remove_record(p_kind text, p_event events) returns bigint language plpgsql as $$
declare
    letter events;
    move record;
    removed bigint := 1;
begin
    if p_kind in ('evaluations', 'verifications', 'hub_uploads') then
        perform from streams s where s.stream = p_event.stream for update skip locked;
        -- Asked again, because it may have changed until it was locked.
        if not found or not may_remove(p_kind, p_event) then
            return 0;
        end if;
        return remove_owner(p_event.run_id);
    end if;
    perform from events e where e.xid = p_event.xid and e.position = p_event.position for update skip locked;
    if not found then
        return 0;
    end if;
    perform remove_event(p_event);
    if p_kind = 'dead_letters' then
        select e.* into letter from dead_letters d join events e
            on e.stream = p_event.stream and e.version = d.version
        where d.letter = p_event.data ->> 'letter';
        if found then
            perform remove_event(letter);
            delete from dead_letters d where d.letter = p_event.data ->> 'letter';
            removed := removed + 1;
        end if;
    elsif p_kind = 'pushes' then
        for move in
            select m.move ->> 'number' as number from json_array_elements(p_event.data -> 'moves') as m (move)
        loop
            removed := removed + remove_push(p_event.run_id, move.number);
            delete from pushes p where p.push = p_event.run_id || '.' || move.number;
        end loop;
    end if;
    return removed;
end $$;
revoke execute on function remove_record(text, events) from public;

-- Look at the next p_most events of a type after (p_time, p_position), and remove the records of a kind that are found
-- by them, older than p_before, until p_most events are gone. Returns how many records were removed and where it
-- ended; null when no such event was left. Rows of the read model go too: they would not come back when it is made
-- again. Sessions that do this at the same time skip each other's records.
create function remove_page(
    p_kind text, p_type text, p_before timestamptz, p_time timestamptz, p_position bigint, p_most integer
) returns table (r_removed bigint, r_time timestamptz, r_position bigint) language plpgsql
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    one events;
    went bigint;
    events_gone bigint := 0;
    streams_cut text[] := '{}';
    versions_cut integer[] := '{}';
begin
    r_removed := 0;
    for one in
        select e.* from events e
        where e.type = p_type and is_record(e.type) and e.time < p_before
          and (e.time, e.position) > (p_time, p_position)
        order by e.time, e.position limit p_most
    loop
        r_time := one.time;
        r_position := one.position;
        continue when not may_remove(p_kind, one);
        went := remove_record(p_kind, one);
        continue when went = 0;
        r_removed := r_removed + 1;
        events_gone := events_gone + went;
        streams_cut := streams_cut || one.stream;
        versions_cut := versions_cut || one.version;
        exit when events_gone >= p_most;
    end loop;
    if p_kind not in ('evaluations', 'verifications', 'hub_uploads') then
        insert into trimmed_streams as t (stream, version)
            select c.stream, max(c.version) from unnest(streams_cut, versions_cut) as c (stream, version)
            group by c.stream order by c.stream
            on conflict (stream) do update set version = greatest(t.version, excluded.version);
    end if;
    return next;
end $$;

-- Remove one evaluation that has ended, whatever its age. Returns whether it was there.
create function remove_evaluation(p_evaluation text) returns boolean language plpgsql
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    ended events;
begin
    select e.* into ended from events e
    where e.stream = 'eval-' || p_evaluation and e.type = 'rl.evaluation.completed'
    order by e.version desc limit 1;
    return found and remove_record('evaluations', ended) > 0;
end $$;

-- Whether an upload was rejected before p_before, or never completed. One that became a dataset goes with it.
create function is_old_upload(p_upload dataset_uploads, p_before timestamptz) returns boolean
language sql stable as $$
    select coalesce(p_upload.rejected_at, p_upload.created_at) < p_before
       and (p_upload.status = 'error' or p_upload.created_at < clock_timestamp() - interval '1 day')
       and not exists (select from streams s where s.stream = 'dataset-' || p_upload.id and s.version > 0)
$$;

-- Records that are rows and no events: alerts that were told or given up, uploads that became no dataset, and the use
-- of models by day. The last is not lost: old days are added up. What was told about a run stays marked with the run,
-- so that it is not told again. p_most rows at once; returns how many.
create function remove_old_rows(p_kind text, p_before timestamptz, p_most integer) returns bigint language plpgsql as $$
declare
    removed bigint := 0;
begin
    if p_kind = 'alerts' then
        delete from alerts a where a.ctid = any (array(
            select o.ctid from alerts o
            where o.channel <> '' and (o.sent_at is not null or o.due_at = 'infinity')
              and coalesce(o.sent_at, o.created_at) < p_before
            order by coalesce(o.sent_at, o.created_at) limit p_most for update skip locked));
        get diagnostics removed = row_count;
    elsif p_kind = 'uploads' then
        delete from dataset_uploads u where u.id in (
            select o.id from dataset_uploads o where is_old_upload(o, p_before)
            limit p_most for update skip locked);
        get diagnostics removed = row_count;
    elsif p_kind = 'usage' then
        with old as materialized (
            delete from inference_usage u where u.ctid = any (array(
                select o.ctid from inference_usage o
                where o.day > '-infinity' and o.day < (p_before at time zone 'utc')::date
                order by o.day limit p_most for update skip locked))
            returning u.*
        ), added as (
            insert into inference_usage as u
                (api_key, model, day, requests, prompt_tokens, completion_tokens, last_at)
            select o.api_key, o.model, '-infinity', sum(o.requests), sum(o.prompt_tokens), sum(o.completion_tokens),
                   max(o.last_at)
            from old o group by o.api_key, o.model order by o.api_key, o.model
            on conflict (api_key, model, day) do update set requests = u.requests + excluded.requests,
                prompt_tokens = u.prompt_tokens + excluded.prompt_tokens,
                completion_tokens = u.completion_tokens + excluded.completion_tokens,
                last_at = greatest(u.last_at, excluded.last_at)
        )
        select count(*) into removed from old;
    end if;
    return removed;
end $$;

-- How many records of each kind p_kinds can be removed that are older than p_before.
create function count_records(p_kinds text[], p_before timestamptz)
returns table (r_kind text, r_count bigint) language sql stable
set enable_seqscan = off set enable_bitmapscan = off as $$
    select k.kind, (
        select count(*) from unnest(record_types(k.kind)) as t (type)
        join events e on e.type = t.type and is_record(e.type) and e.time < p_before
        where may_remove(k.kind, e)
    ) + case k.kind
        when 'alerts' then (
            select count(*) from alerts o
            where o.channel <> '' and (o.sent_at is not null or o.due_at = 'infinity')
              and coalesce(o.sent_at, o.created_at) < p_before)
        when 'uploads' then (
            select count(*) from dataset_uploads o where is_old_upload(o, p_before))
        when 'usage' then (
            select count(*) from inference_usage o
            where o.day > '-infinity' and o.day < (p_before at time zone 'utc')::date)
        else 0 end
    from unnest(p_kinds) as k (kind)
$$;

-- The same for processes of the version before, which still run during an upgrade: each call begins again.
create function remove_records(p_kind text, p_before timestamptz, p_owner text, p_most integer)
returns bigint language plpgsql as $$
declare
    found_type text;
    removed bigint;
    upto timestamptz;
    place bigint;
begin
    if p_owner is not null then
        return remove_evaluation(p_owner)::integer;
    end if;
    foreach found_type in array record_types(p_kind) loop
        upto := '-infinity';
        place := 0;
        while upto is not null loop
            select r.r_removed, r.r_time, r.r_position into removed, upto, place
            from remove_page(p_kind, found_type, p_before, upto, place, p_most) r;
            if removed > 0 then
                return removed;
            end if;
        end loop;
    end loop;
    return 0;
end $$;

-- A caller needs only the role of processes, which begin_removal asks for.
alter function remove_run(text, boolean, bigint, uuid, text, integer, text, uuid)
    security definer set search_path = public, pg_temp;
alter function restore_run(text, bigint, uuid, text, integer, text, uuid)
    security definer set search_path = public, pg_temp;
alter function remove_dataset(text, text[], uuid, text, integer, text, uuid)
    security definer set search_path = public, pg_temp;
alter function remove_dataset_version(text, text, boolean, text[], uuid, text, integer, text, uuid)
    security definer set search_path = public, pg_temp;
alter function remove_artifact(text, text[], uuid, text, integer, text, uuid)
    security definer set search_path = public, pg_temp;
alter function remove_page(text, text, timestamptz, timestamptz, bigint, integer)
    security definer set search_path = public, pg_temp;
alter function remove_evaluation(text)
    security definer set search_path = public, pg_temp;
alter function remove_records(text, timestamptz, text, integer)
    security definer set search_path = public, pg_temp;


-- == Access to the API =====================================================================================

-- API keys. The database holds only the SHA-256 of a key. `workspace` is the only one that the key is for,
-- or null for all. A key that was revoked stays, so that the audit list can say whose it was. A rotation
-- replaces the secret, and the old one stays valid until `old_until`.
create table api_keys (
    id           text primary key,
    name         text not null,
    owner        text not null,
    prefix       text not null,
    sha256       bytea not null,
    scopes       text[] not null,
    workspace    text,
    expires_at   timestamptz,
    created_at   timestamptz not null default clock_timestamp(),
    created_by   text not null,
    last_used_at timestamptz,
    revoked_at   timestamptz,
    old_sha256   bytea,
    old_until    timestamptz,
    rotated_at   timestamptz,
    organisation text,
    person       text
);
create unique index api_keys_name on api_keys
    (coalesce(organisation, ''), coalesce(workspace, ''), coalesce(person, ''), name) where revoked_at is null;
create index api_keys_by_person on api_keys (person) where person is not null;

-- Tenants. An organisation has members, who are people with a role, and workspaces. What was there before there were
-- organisations belongs to `main`.
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
    changed_at   timestamptz not null default clock_timestamp(),
    from_groups  boolean not null default false,
    primary key (organisation, person)
);
create index members_by_person on members (person);

-- Which account of an OpenID Connect provider is which person.
create table person_accounts (
    issuer       text not null,
    subject      text not null,
    person       text not null references people,
    created_at   timestamptz not null default clock_timestamp(),
    signed_in_at timestamptz not null default clock_timestamp(),
    primary key (issuer, subject)
);
create unique index person_accounts_by_person on person_accounts (person, issuer);

-- Sign-ins with that provider that have begun. Only hashes of the state, and of what the browser keeps.
create table sign_in_attempts (
    state_sha256   bytea primary key,
    browser_sha256 bytea not null,
    next           text not null,
    expires_at     timestamptz not null
);
create index sign_in_attempts_by_expiry on sign_in_attempts (expires_at);

-- An invitation into an organisation. `inviter` is the person who made it; it ends when that person is not an owner any more.
create table invitations (
    id           text primary key,
    sha256       bytea not null unique,
    organisation text not null,
    role         text not null check (role in ('owner', 'member', 'viewer')),
    email        text,
    created_at   timestamptz not null default clock_timestamp(),
    created_by   text not null,
    inviter      text,
    expires_at   timestamptz not null
);
create index invitations_by_organisation on invitations (organisation, created_at);

-- A program that waits for its API key, until a person approves or denies it, or the time is over. What it will be is
-- written with the approval; the key is made when the program asks next, and the row goes.
create table device_logins (
    device_sha256  bytea primary key,
    user_sha256    bytea not null unique,
    device_name    text not null,
    address        text not null,
    created_at     timestamptz not null default clock_timestamp(),
    expires_at     timestamptz not null,
    polled_at      timestamptz,
    interval_s     integer not null,
    decided_at     timestamptz,
    approved       boolean,
    person         text,
    organisation   text,
    workspace      text,
    scopes         text[],
    approved_by    text,
    key_expires_at timestamptz
);
create index device_logins_by_expiry on device_logins (expires_at);

-- The organisation of each workspace, and the repository (`owner/name`) that names it within the organisation.
create table workspace_homes (
    workspace    text primary key,
    organisation text not null,
    repository   text
);
create unique index workspace_homes_repository on workspace_homes (organisation, repository);

-- What an administrator lets a workspace use; null is without a limit. A quota that has no row has the limit of the
-- operator's settings.
create table workspace_quotas (
    workspace text not null,
    name      text not null,
    most      bigint,
    primary key (workspace, name)
);

-- What the operator lets an organisation use, in the same form.
create table organisation_quotas (
    organisation text not null,
    name         text not null,
    most         bigint,
    primary key (organisation, name)
);

-- What an owner of the organisation lets a workspace use, within what the operator allows.
create table owner_quotas (
    workspace text not null,
    name      text not null,
    most      bigint not null,
    primary key (workspace, name)
);

-- Runs and evaluations that were let in, with the workspace, the API key and the organisation for which they count.
create table admitted_runs (
    run         text primary key,
    stream      text not null,
    workspace   text,
    key         text,
    admitted_at timestamptz not null default clock_timestamp(),
    organisation text
);
create index admitted_runs_by_workspace on admitted_runs (workspace, admitted_at);
create index admitted_runs_by_key on admitted_runs (key, admitted_at);
create index admitted_runs_by_organisation on admitted_runs (organisation, admitted_at);

-- Bytes and deployments that were let in and are not stored or deployed yet.
create table admitted_amounts (
    kind         text not null check (kind in ('bytes', 'deployment')),
    id           text not null,
    organisation text not null,
    workspace    text,
    amount       bigint not null,
    admitted_at  timestamptz not null default clock_timestamp(),
    primary key (kind, id)
);

-- What an organisation, a workspace or an API key (`holder`) used of a quota since the beginning of its minute or day.
create table quota_use (
    holder text not null,
    name   text not null,
    since  timestamptz not null,
    used   bigint not null,
    primary key (holder, name)
);

-- Who asked for what. A request that changes something has a row of its own. Reads and refused requests that are
-- alike share a row, from `at` to `last_at`.
create table audit (
    id        bigint generated always as identity primary key,
    at        timestamptz not null,
    last_at   timestamptz not null,
    count     integer not null,
    allowed   boolean not null,
    api_key   text,
    owner     text,
    workspace text,
    address   text not null,
    method    text not null,
    route     text not null,
    subject   text not null,
    status    smallint not null,
    organisation text,
    previous_sha256 bytea,
    sha256    bytea
);
create index audit_by_time on audit (at);
create index audit_by_api_key on audit (api_key, id);

-- The last hash of each chain of the audit list. Its lock gives the entries of all processes one order.
create table audit_heads (
    chain  text primary key,
    sha256 bytea not null
);
insert into audit_heads (chain, sha256)
values ('changes', decode(repeat('00', 32), 'hex')), ('others', decode(repeat('00', 32), 'hex'));


-- == Connections to forges ==================================================================================

-- One row for each connected workspace. `secret` and `previous_secret` are those of the webhook, and
-- `credential` is a token, a key or a GitHub App. All three are sealed (infra/identity/secrets/sealed.py). The
-- previous secret is valid until `previous_until`.
create table connections (
    workspace       text primary key,
    forge           text not null,
    url             text not null,
    hook            text,
    secret          bytea,
    previous_secret bytea,
    previous_until  timestamptz,
    credential      bytea,
    created_at      timestamptz not null default clock_timestamp(),
    updated_at      timestamptz not null default clock_timestamp()
);

-- Secrets of workspaces and persons. `sealed` is an envelope (infra/identity/secrets/sealed.py), and `key` is the id of the
-- key that wraps its data key. `owner` is the id of a workspace, or the owner of an API key.
create table secrets (
    id         uuid primary key default gen_random_uuid(),
    scope      text not null check (scope in ('workspace', 'personal')),
    owner      text not null,
    name       text not null check (length(name) <= 64),
    sealed     bytea not null,
    key        text not null,
    created_at timestamptz not null default clock_timestamp(),
    created_by text not null,
    updated_at timestamptz not null default clock_timestamp(),
    updated_by text not null,
    used_at    timestamptz,
    unique (scope, owner, name)
);

-- Secrets that a submission gave for its run or evaluation (`owner`) alone, sealed in the same way. The projector
-- deletes them when it sees that the run ended.
create table run_secrets (
    owner      text not null,
    name       text not null check (length(name) <= 64),
    sealed     bytea not null,
    key        text not null,
    created_at timestamptz not null default clock_timestamp(),
    primary key (owner, name)
);


-- == The rights of processes ==============================================================================

-- A process may do everything that it needs, and never drop a table or rewrite what is recorded.

-- Make the role of processes and give it its rights: here, and again in a cluster that a dump was restored into. The
-- role is shared by all databases of a server, so another database may have made it already.
create function grant_processes() returns void language plpgsql as $$
declare
    t name;
    rights text;
begin
    if not exists (select from pg_roles where rolname = 'headrace_worker') then
        begin
            create role headrace_worker nologin;
        exception
            when duplicate_object or unique_violation then null;
            when insufficient_privilege then
                raise exception '% may not create roles: let an administrator run'
                    ' "create role headrace_worker nologin; grant headrace_worker to %"',
                    current_user, current_user;
        end;
    end if;
    if not (select rolsuper from pg_roles where rolname = current_user)
       and not pg_has_role(current_user, 'headrace_worker', 'usage') then
        execute format('grant headrace_worker to %I', current_user);
    end if;
    execute format('grant usage on schema %I to headrace_worker', current_schema());
    for t in select tablename from pg_tables where schemaname = current_schema() loop
        rights := case
            when t = 'events' then 'select, insert'
            when t = 'artifacts' then 'select, insert, delete'
            when t in ('migrations', 'cluster') then 'select'
            -- What follows from the log alone is emptied as a whole before it is projected again.
            when t in ('runs', 'metric_points', 'checkpoints', 'graded_groups', 'costs', 'log_lines',
                       'datasets', 'published_artifacts', 'workspaces', 'evaluations', 'dead_letters',
                       'deliveries', 'pushes', 'triggered_runs', 'deployments', 'hub_uploads')
                then 'select, insert, update, delete, truncate'
            else 'select, insert, update, delete'
        end;
        execute format('revoke all on %I from headrace_worker', t);
        execute format('grant %s on %I to headrace_worker', rights, t);
    end loop;
    execute format('alter default privileges in schema %I grant select, insert, update, delete'
                   ' on tables to headrace_worker', current_schema());
end $$;
revoke execute on function grant_processes() from public;
select grant_processes();
