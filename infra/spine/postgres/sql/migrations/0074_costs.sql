-- The cost ledger. An effect keeps the device-seconds of attempts that were repeated or lost, until the event that ends
-- it says them.

alter table effects add column wasted_s double precision not null default 0;
alter table effects add column claimed_at timestamptz default clock_timestamp();

create or replace function note_progress() returns trigger language plpgsql as $$
begin
    new.progressed_at := clock_timestamp();
    if new.epoch <> old.epoch then
        new.claimed_at := new.progressed_at;
    end if;
    return new;
end $$;

create or replace function give_back_effects(p_dead text) returns void language plpgsql
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

alter table costs enable row level security;
create policy visible_workspaces on costs using (
    (select shown_workspaces()) is null or owner in (select r.run from runs r)
    or owner in (select v.evaluation from evaluations v));

create or replace function remove_owner(p_owner text) returns bigint language plpgsql as $$
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

create or replace function grant_processes() returns void language plpgsql as $$
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
select grant_processes();
