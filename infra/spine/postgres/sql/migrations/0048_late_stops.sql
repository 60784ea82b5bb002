-- An evaluation or a push to a hub that was asked to stop once it had ended can be removed, too.

create or replace function ended_records(p_kind text, p_before timestamptz)
returns table (r_owner text, r_stream text, r_version integer, r_time timestamptz)
language sql stable as $$
    select e.run_id, e.stream, s.version, e.time from events e join streams s on s.stream = e.stream
    where e.type = any (case p_kind
                        when 'evaluations' then array['rl.evaluation.completed']
                        when 'verifications' then array['rl.verification.completed']
                        when 'hub_pushes' then array['rl.hub-push.pushed', 'rl.hub-push.failed'] end)
      and is_record(e.type) and e.time < p_before
      and (s.version = e.version or not exists (
          select from events n where n.stream = e.stream and n.version > e.version
            and n.type not in ('rl.evaluation.stop-requested', 'rl.hub-push.cancel-requested')))
      and (p_kind <> 'evaluations' or e.data ->> 'run' is null)
      and not exists (select from effects f where f.run_id = e.run_id)
$$;
