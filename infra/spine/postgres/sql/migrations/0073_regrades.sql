-- A run is neither archived nor deleted while a regrade of it works: its events belong to the run, and its effects
-- to the regrade.
create or replace function remove_run(
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

-- A caller needs only the role of processes, which begin_removal asks for.
do $$
begin
    execute format('alter function remove_run(text, boolean, bigint, uuid, text, integer, text, uuid)'
                   ' security definer set search_path = %I, pg_temp', current_schema());
end $$;
