-- Who or what started a run: the owner of the token that submitted it, or the push.
alter table runs add column creator text;

update runs r set creator = coalesce(
    'push to ' || regexp_replace(e.data->'origin'->'push'->>'ref', '^refs/(heads|tags)/', ''),
    e.data->>'submitter')
from events e where e.stream = 'run-' || r.run and e.type = 'rl.run.requested';
