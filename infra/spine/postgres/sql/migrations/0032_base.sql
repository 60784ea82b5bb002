-- The schema that migrations 0001 to 0032 ended in, as one. A database that has applied those has it.
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
-- Only what edges appended: such an event begins a correlation of its own, and a retry of the edge finds it
-- here by its id. The log itself remembers, so no row in the inbox has to be kept for it.
create index events_edge on events (id) where causation = correlation;

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
-- know of: a claim that a network delivers late names a generation that is over, and takes nothing.
create table workers (
    id         text primary key,
    host       text not null,
    pid        integer not null,
    lanes      text[] not null default '{}',
    started_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null,
    generation integer not null default 0
);

-- Whether the effects of a run may be claimed. `state` follows from the run's own events. `holds` counts the
-- dead letters that pause the run, which is independent of its state.
create table run_gates (
    run_id text primary key,
    state  text not null check (state in ('open', 'paused', 'closed')),
    holds  integer not null default 0
);
create index gates_resting on run_gates (run_id) where state = 'paused' or holds > 0;

-- Work that was requested and is not finished. A claim is (worker, epoch), and is live while the lease of its
-- worker is. An outcome is accepted only under the epoch of the claim. `shut` repeats what the run's gate
-- says, so that the index of claimable effects leaves out the runs that rest; a claim checks the gate as well.
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
    shut        boolean not null default false
) with (fillfactor = 50);
alter table effects set (autovacuum_vacuum_scale_factor = 0.02);
-- What can be claimed, in the order in which it is claimed. One that is due later is not met before its time.
create index effects_ready on effects (lane, consumer, due_at, created) where worker is null and not shut;
-- What is claimed: dead holders are found by going from holder to holder.
create index effects_held on effects (worker) where worker is not null;
create index effects_run on effects (run_id);

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
        update effects e set shut = false where e.run_id = new.run_id and e.shut;
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
--   f_*                                            effects to request; f_claimed: p_worker performs it at once
--   a_*                                            small artifacts
--   g_*                                            gates to set: a state, or 'hold' or 'release', or 'reopened',
--                                                  which only a closed gate follows
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
    e_actor text[]
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
    -- Effects, but none in the name of a closed run: nobody would ever claim it.
    if cardinality(f_id) > 0 then
        insert into effects (id, consumer, stream, lane, run_id, type, data, correlation,
                             traceparent, worker, epoch, shut)
        select f.id, f.consumer, f.stream, f.lane, f.run, f.type, f.data::json, f.correlation,
               f.trace, case when f.claimed then p_worker end, case when f.claimed then 1 else 0 end,
               coalesce(f.run = any (resting), false)
        from unnest(f_id, f_consumer, f_stream, f_lane, f_run, f_type, f_data, f_correlation,
                    f_trace, f_claimed)
             as f (id, consumer, stream, lane, run, type, data, correlation, trace, claimed)
        where not exists (select from run_gates g where g.run_id = f.run and g.state = 'closed')
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
    g_run text[], g_state text[]
) returns table (r_position bigint, r_xid xid8, r_time timestamptz)
language sql as $$
    select * from commit_decision(
        p_worker, p_consumers, p_consumed, p_xids, p_positions, p_finished, p_epochs, p_streams,
        p_expected, p_versions, e_id, e_stream, e_version, e_type, e_schema, e_data, e_run, e_causation,
        e_correlation, e_trace, f_id, f_consumer, f_stream, f_lane, f_run, f_type, f_data,
        f_correlation, f_trace, f_claimed, a_sha, a_data, g_run, g_state,
        '{}')
$$;


-- == Claims ===============================================================================================

-- Claim due effects: the worker's lease is live, the gate is open, the run is not held, and no other worker with
-- a live lease holds them. Taking over from a dead worker counts a crash, and comes first. Effects that this
-- worker already holds are not claimed again, even if its lease ran out meanwhile. What a dead worker held of runs
-- that rest is given back. Of several queues (one per lane and consumer) the one whose head has been due the
-- longest goes first.
--
-- The settings and the subqueries fix the plans, because a session keeps the plan that it made when the table was
-- empty. `(select clock_timestamp())` is evaluated once, after the snapshot, so that an index can compare with it
-- and nothing that the snapshot shows is taken to lie in the future.
create function claim_effects(p_worker text, p_lanes text[], p_consumers text[], p_limit integer)
returns setof effects language plpgsql
set enable_seqscan = off set enable_bitmapscan = off as $$
declare
    dead text;
    queue record;
    taken integer;
    room integer := p_limit;
begin
    if not exists (select from workers w where w.id = p_worker and w.expires_at > clock_timestamp()) then
        return;
    end if;
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
        exit when room = 0;
        -- Once: then they lie with what waits for their runs, and the next claim does not meet them.
        update effects e set worker = null, crashes = e.crashes + 1
        where e.id in (select c.id from effects c where c.worker = dead and c.shut
                       for update skip locked);
        return query
            with picked as materialized (
                select c.id from effects c
                where c.worker = dead and not c.shut
                  and c.lane = any (p_lanes) and c.consumer = any (p_consumers)
                  and c.due_at <= (select clock_timestamp())
                  and coalesce((select g.state = 'open' and g.holds = 0
                                from run_gates g where g.run_id = c.run_id), true)
                order by c.due_at, c.created
                limit room
                for update skip locked
            )
            update effects e
            set worker = p_worker, epoch = e.epoch + 1, crashes = e.crashes + 1
            from picked p where e.id = p.id
            returning e.*;
        get diagnostics taken = row_count;
        room := room - taken;
    end loop;
    for queue in
        select q.lane, q.consumer
        from (select l.lane, n.consumer
              from unnest(p_lanes) as l (lane) cross join unnest(p_consumers) as n (consumer)) q
        cross join lateral (
            select e.due_at, e.created from effects e
            where e.worker is null and not e.shut and e.lane = q.lane and e.consumer = q.consumer
              and e.due_at <= (select clock_timestamp())
            order by e.due_at, e.created limit 1
        ) head
        order by head.due_at, head.created
    loop
        exit when room = 0;
        return query
            with picked as materialized (
                select c.id from effects c
                where c.worker is null and not c.shut and c.lane = queue.lane and c.consumer = queue.consumer
                  and c.due_at <= (select clock_timestamp())
                  and coalesce((select g.state = 'open' and g.holds = 0
                                from run_gates g where g.run_id = c.run_id), true)
                order by c.due_at, c.created
                limit room
                for update skip locked
            )
            update effects e
            set worker = p_worker, epoch = e.epoch + 1
            from picked p where e.id = p.id
            returning e.*;
        get diagnostics taken = row_count;
        room := room - taken;
    end loop;
end $$;

-- Claim under the generation that the worker believes in: raises HR003 when that one is over. It takes an advisory
-- lock and not a row lock, because a claim that finds nothing must take no transaction id, and a lease is renewed
-- meanwhile.
create function claim_effects(
    p_worker text, p_lanes text[], p_consumers text[], p_limit integer, p_generation integer
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
    return query select * from claim_effects(p_worker, p_lanes, p_consumers, p_limit);
end $$;

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
    creator        text
) with (fillfactor = 50);
create index runs_name on runs (name);
create index runs_recent on runs (created_at desc, run);
create index runs_by_workspace on runs (workspace, created_at desc, run);

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
    workspace  text
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
    updated_at timestamptz,
    provider   text,
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
    provider  text,
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


-- == What edges keep ======================================================================================

-- Not in the log, and not rebuilt from it.

-- Names that were reserved before anything is appended under them.
create table names (
    kind       text not null,
    name       text not null,
    id         text not null,
    created_at timestamptz not null default clock_timestamp(),
    primary key (kind, name)
);

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
    issues      text
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

-- Deployments: the checkpoint that each name serves (`served`, as JSON), and the one that is being loaded.
create table deployments (
    deployment   text primary key,
    workspace    text,
    status       text not null default 'inactive',
    number       bigint,
    served       text,
    pending      text not null default '',
    error        text not null default '',
    requested_by text,
    created_at   timestamptz not null,
    updated_at   timestamptz,
    deployed_at  timestamptz
);

-- The requests and tokens that each access token used, by model and day. This does not follow from the log.
create table inference_usage (
    token             text not null,
    model             text not null,
    day               date not null default (clock_timestamp() at time zone 'utc')::date,
    requests          bigint not null default 0,
    prompt_tokens     bigint not null default 0,
    completion_tokens bigint not null default 0,
    last_at           timestamptz not null default clock_timestamp(),
    primary key (token, model, day)
);

-- Pushes of checkpoints to a model hub: what was asked for, and what became of it.
create table hub_pushes (
    push         text primary key,
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
create index hub_pushes_by_run on hub_pushes (run, step, created_at);

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
-- `token_sha256` is that of the token that signed in, so a session ends with its token.
create table browser_sessions (
    sha256       bytea primary key,
    token        text not null,
    token_sha256 bytea not null,
    created_at   timestamptz not null default clock_timestamp(),
    expires_at   timestamptz not null
);

create table sign_in_codes (
    sha256       bytea primary key,
    token        text not null,
    token_sha256 bytea not null,
    expires_at   timestamptz not null
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
-- nothing, and would hide what is appended next: a repair after the restore prevents that.
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
-- keeps only the notice, and frees the run's names. The closed gate stays in both cases, and so does the run's own
-- stream, with a version that fits what is in it. Raises HR001 when the log holds other events than were archived.
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
    if exists (select from effects f where f.run_id = any (owners)
               or (f.type = 'VerifyRun' and f.data ->> 'run' = p_run)) then
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

-- A caller needs only the role of processes, which begin_removal asks for.
alter function remove_run(text, boolean, bigint, uuid, text, integer, text, uuid)
    security definer set search_path = public, pg_temp;
alter function restore_run(text, bigint, uuid, text, integer, text, uuid)
    security definer set search_path = public, pg_temp;
alter function remove_dataset(text, text[], uuid, text, integer, text, uuid)
    security definer set search_path = public, pg_temp;


-- == Access to the API =====================================================================================

-- Tokens of the API. The database holds only the SHA-256 of a token. `workspace` is the only one that the token
-- is for, or null for all. A token that was revoked stays, so that the audit list can say whose it was.
create table api_tokens (
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
    revoked_at   timestamptz
);
create unique index api_tokens_name on api_tokens (coalesce(workspace, ''), name) where revoked_at is null;

-- Who asked for what. A request that changes something has a row of its own. Reads and refused requests that are
-- alike share a row, from `at` to `last_at`.
create table audit (
    id        bigint generated always as identity primary key,
    at        timestamptz not null,
    last_at   timestamptz not null,
    count     integer not null,
    allowed   boolean not null,
    token     text,
    owner     text,
    workspace text,
    address   text not null,
    method    text not null,
    route     text not null,
    subject   text not null,
    status    smallint not null
);
create index audit_by_time on audit (at);
create index audit_by_token on audit (token, id);


-- == Connections to forges ==================================================================================

-- One row for each connected workspace. `secret` and `previous_secret` are those of the webhook, and
-- `credential` is a token, a key or a GitHub App. All three are sealed. The
-- previous secret is valid until `previous_until`.
create table connections (
    workspace       text primary key,
    provider        text not null,
    url             text not null,
    hook            text,
    secret          bytea,
    previous_secret bytea,
    previous_until  timestamptz,
    credential      bytea,
    created_at      timestamptz not null default clock_timestamp(),
    updated_at      timestamptz not null default clock_timestamp()
);

-- Secrets of workspaces and persons. `sealed` is an envelope, and `key` is the id of the
-- key that wraps its data key. `owner` is the id of a workspace, or the owner of a token.
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
            when t in ('runs', 'metric_points', 'checkpoints', 'graded_groups', 'log_lines',
                       'datasets', 'workspaces', 'evaluations', 'dead_letters',
                       'deliveries', 'pushes', 'triggered_runs', 'deployments', 'hub_pushes')
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
