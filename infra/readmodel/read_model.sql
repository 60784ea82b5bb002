-- The read model: what `infra/readmodel/` writes and asks.
-- How this file is read: `infra/spine/postgres/queries.py`.

-- == Runs =================================================================================================

-- A running run without progress for 60 seconds, while no worker lives, has status unknown.

-- part: run_status
case when r.status = 'running' and r.phase <> 'paused'
  and coalesce(r.last_at, r.created_at) < clock_timestamp() - interval '60 seconds'
  and not exists (select from workers where expires_at > clock_timestamp())
  then 'unknown' else r.status end

-- A run with such a letter waits, whatever its own events say.

-- part: from_letters_that_hold_it
from dead_letters d where d.about = r.run and d.pauses and d.redriven_at is null

-- part: run_phase
case when r.status in ('pending', 'running') and exists (select {from_letters_that_hold_it}) then 'paused'
  when r.status = 'running' and r.phase = 'train' and r.current_step >= r.total_steps
  then 'finalize' else r.phase end

-- Why the run ended, or why a run that goes on makes no progress.

-- part: run_error
case when r.status in ('pending', 'running') then coalesce(r.error, (select
  'held by dead letter ' || d.letter || ' of ' || d.consumer || ': ' || d.cause {from_letters_that_hold_it}
  order by d.created_at limit 1), (select 'waiting: ' || f.error from effects f
  where f.run_id = r.run and f.error is not null order by f.due_at desc limit 1)) else r.error end

-- The version of the dataset that a run reads. The first one is not written, as in events from before there
-- were versions, and is not part of the name either.

-- part: dataset_version
coalesce((r.dataset_ref::json ->> 'version')::int, 1)

-- part: dataset_name
r.dataset || coalesce('@' || (r.dataset_ref::json ->> 'version'), '')

-- The label that the config of a run gives it.

-- part: run_project
(r.config::json -> 'advanced' ->> 'project')

-- part: run_summary
r.run as id, r.name, {run_status} as status, {run_phase} as phase, r.algorithm,
  r.execution_mode, r.model, {dataset_name} as dataset, {dataset_version} as dataset_version,
  r.dataset_ref::json ->> 'dataset' as dataset_id, r.rollout, r.workspace, r.commit_sha, r.current_step,
  r.total_steps, r.reward, r.created_at, r.started_at, r.completed_at, r.archived_at,
  r.creator, {run_error} as error,
  coalesce((select n.tags from run_notes n where n.run = r.run), array[]::text[]) as tags,
  (select n.note from run_notes n where n.run = r.run and n.note <> '') as note,
  (select w.name from workspaces w where w.workspace = r.workspace) as workspace_name,
  {run_project} as project, r.parent, r.parent_step,
  (select p.name from runs p where p.run = r.parent) as parent_name

-- A page of runs is filtered by status, by whether they are archived, and by words. Each filter is a choice
-- and not an `or` on its argument, so that the plan fits what is asked. The parts that filter nothing name
-- the argument all the same, because Postgres must know its type.

-- part: with_status
({run_status}) = $1

-- Pages show a running run that is paused as such.

-- part: paused
({run_status}) = 'running' and ({run_phase}) = 'paused' and $1::text = 'paused'

-- part: with_any_status
$1::text is null

-- part: archived
r.archived_at is not null

-- part: present
r.archived_at is null

-- part: with_words
(r.name || ' ' || r.model || ' ' || r.dataset) ilike $2

-- part: with_any_words
$2::text is null

-- part: of_workspace
r.workspace = any($3::text[])

-- part: of_any_workspace
$3::text[] is null

-- Exact names. That of a dataset selects all of its versions, unless it ends with one. A workspace is named by its id or its name.

-- part: narrowed
($4::text is null or $4 in (r.dataset, r.dataset || '@' || {dataset_version})) and ($5::text is null or r.model = $5)
  and ($6::text is null or r.rollout = $6) and ($7::text is null or r.workspace in (
    select workspace from workspaces where workspace = $7 or name = $7))
  and ($8::text is null or r.creator = $8)
  and ($9::text is null or r.run in (select n.run from run_notes n where n.tags @> array[$9::text]))
  and ($10::text is null or {run_project} = $10)

-- part: of_any_kind
coalesce($4::text, $5::text, $6::text, $7::text, $8::text, $9::text, $10::text) is null

-- part: runs_that_match
runs r
where {status: with_status | with_any_status | paused} and {archived: archived | present}
  and {words: with_words | with_any_words} and {reach: of_workspace | of_any_workspace}
  and {kind: narrowed | of_any_kind}

-- The forks of a run.

-- part: forks_of_run
runs r where r.parent = $1 and ($2::text[] is null or r.workspace = any ($2))

-- name: page_of_forks
select {run_summary} from {forks_of_run} order by r.created_at, r.run limit $3 offset $4

-- name: count_forks
select count(*) from {forks_of_run}

-- The orders of runs, each with its reverse. All end with the start and the id, so no two runs share a place.

-- part: newest_first
r.created_at desc, r.run

-- part: oldest_first
r.created_at, r.run desc

-- part: best_first
r.reward desc nulls last, r.created_at desc, r.run

-- part: worst_first
r.reward nulls first, r.created_at, r.run desc

-- part: by_name
r.name, r.created_at desc, r.run

-- part: by_name_reversed
r.name desc, r.created_at, r.run desc

-- The runs beyond a place: a start $11, an id $12, and in some orders a reward $13 or a name $14. A run
-- without a reward comes after all others. None of these is null, so they can be counted.

-- part: older
(r.created_at <= $11 and (r.created_at < $11 or r.run > $12))

-- part: newer
(r.created_at >= $11 and (r.created_at > $11 or r.run < $12))

-- part: without_value
$13::float8 is null and $14::text is null

-- part: at_any_place
$11::timestamptz is null and $12::text is null and {without_value}

-- part: started_before
{older} and {without_value}

-- part: started_after
{newer} and {without_value}

-- part: rewarded_less
(($13::float8 is not null and (r.reward is null or r.reward < $13))
  or (r.reward is not distinct from $13 and {older})) and $14::text is null

-- part: rewarded_more
((r.reward is not null and ($13::float8 is null or r.reward > $13))
  or (r.reward is not distinct from $13 and {newer})) and $14::text is null

-- part: named_later
r.name >= $14 and (r.name > $14 or {older}) and $13::float8 is null

-- part: named_earlier
r.name <= $14 and (r.name < $14 or {newer}) and $13::float8 is null

-- name: page_of_runs
select {run_summary} from {runs_that_match} order by {newest_first} limit $11 offset $12

-- name: count_runs
select count(*) from {runs_that_match}

-- name: runs_beyond
select {run_summary} from {runs_that_match}
  and {place: at_any_place | started_before | started_after | rewarded_less | rewarded_more | named_later | named_earlier}
order by {order: newest_first | oldest_first | best_first | worst_first | by_name | by_name_reversed}
limit $15

-- name: count_runs_beyond
select count(*) as total, count(*) filter (where
  {place: at_any_place | started_before | started_after | rewarded_less | rewarded_more | named_later | named_earlier}
) as beyond from {runs_that_match}

-- name: runs_ended_before
select {run_summary} from runs r where r.archived_at is null
and greatest(r.completed_at, r.restored_at) < $1 order by r.completed_at limit 1000

-- name: run
select {run_summary}, r.config from runs r
where (r.run = $1 or r.name = $1) and ($2::text[] is null or r.workspace = any($2))
order by (r.run = $1) desc, r.created_at desc limit 100

-- The newest runs with the model, data, code and workspace of a run, and with it.

-- name: runs_beside
select {run_summary}, r.config from runs r join runs x on x.run = $1
where r.model = x.model and r.dataset_ref = x.dataset_ref and r.algorithm = x.algorithm
and r.rollout is not distinct from x.rollout and r.commit_sha is not distinct from x.commit_sha
and r.workspace is not distinct from x.workspace and r.archived_at is null
and ($2::text[] is null or r.workspace = any($2))
order by r.run = $1 desc, r.created_at desc, r.run limit $3

-- name: begin_run_notes
insert into run_notes (run) values ($1) on conflict do nothing

-- name: lock_run_notes
select tags, note from run_notes where run = $1 for update

-- name: set_run_notes
update run_notes set tags = $2, note = $3, changed_by = $4, changed_at = clock_timestamp()
where run = $1

-- name: run_notes
select tags, note, changed_by, changed_at from run_notes where run = $1

-- name: dataset_ref_of_run
select dataset_ref from runs where run = $1

-- JSON cannot hold NaN and infinity. Here NaN is larger than all numbers.

-- name: metrics
select key, step, value, at from metric_points
where run = $1 and value > '-Infinity' and value < 'Infinity' order by key, step

-- Few values of one metric for each of several runs. Each is looked up by the key of the table.

-- name: sparklines
select r.run, m.step, m.value from unnest($1::text[], $2::int[]) as r (run, steps)
cross join lateral generate_series(1, greatest(r.steps, 1), greatest(1, r.steps / $4)) as wanted (step)
join metric_points m on m.run = r.run and m.key = $3 and m.step = wanted.step
order by r.run, m.step

-- How long the newest $4 steps of each run took, on average. A step that a pause made much longer than the
-- others counts as ten of them.

-- name: step_seconds
with took as (
  select r.run, extract(epoch from m.at - lag(m.at) over steps) / (m.step - lag(m.step) over steps) as s
  from unnest($1::text[], $2::int[]) as r (run, step)
  join metric_points m on m.run = r.run and m.key = $3 and m.step between r.step - $4 and r.step
  window steps as (partition by r.run order by m.step)
), usual as (
  select run, percentile_cont(0.5) within group (order by s) as s from took group by run
) select run, avg(least(took.s, 10 * usual.s))::float8 as seconds from took join usual using (run)
where took.s is not null group by run

-- name: metric_keys
with recursive keys as (
  (select min(key) as key from metric_points where run = $1)
  union all
  select (select min(key) from metric_points where run = $1 and key > keys.key) from keys
  where keys.key is not null
) select key from keys where key is not null

-- name: curve
select step, value from metric_points where run = $1 and key = $2
and at >= coalesce($3, '-infinity'::timestamptz) order by step

-- The first step at which metrics of two histories differ. A history is made of parts of runs, each from a first to a
-- last step.

-- name: differing_metrics
with a as (
  select p.key, p.step, p.value from unnest($1::text[], $2::integer[], $3::integer[]) as s (run, first, last)
  join metric_points p on p.run = s.run and p.key = any ($7) and p.step between s.first and s.last
), b as (
  select p.key, p.step, p.value from unnest($4::text[], $5::integer[], $6::integer[]) as s (run, first, last)
  join metric_points p on p.run = s.run and p.key = any ($7) and p.step between s.first and s.last
)
select key, min(step) as step from a join b using (key, step)
where a.value is distinct from b.value group by key

-- Few points of each metric: of each stretch of steps the least and the largest value. The stretches of a
-- metric are as wide as needed for $4 of them. A stretch that holds only NaN has its first step alone.

-- name: thinned_curves
select k.key, r.first, r.first_value, r.last, r.last_value, s.step, s.lowest, s.highest
from unnest($2::text[]) as k (key)
cross join lateral (
  select f.step as first, f.value as first_value, l.step as last, l.value as last_value,
    (l.step - f.step) / $4::int + 1 as width
  from (select step, value from metric_points where run = $1 and key = k.key
      and at >= coalesce($3, '-infinity'::timestamptz)
      and step between $5::int and $6::int order by step limit 1) f,
    (select step, value from metric_points where run = $1 and key = k.key
      and at >= coalesce($3, '-infinity'::timestamptz)
      and step between $5::int and $6::int order by step desc limit 1) l
) r
cross join lateral (
  select min(m.step) as step,
    min(array[m.value, m.step]) filter (where m.value <> 'NaN') as lowest,
    max(array[m.value, m.step]) filter (where m.value <> 'NaN') as highest
  from metric_points m
  where m.run = $1 and m.key = k.key and m.step between r.first and r.last
  group by (m.step - r.first) / r.width
) s

-- Points of each metric that are evenly apart, about $4 of them, with the first and the last one. They are
-- looked up one by one, so this takes as long for a long run as for a short one.

-- name: sampled_curves
select distinct k.key, m.step, m.value
from unnest($2::text[]) as k (key)
cross join lateral (
  select f.step as first, l.step as last
  from (select step from metric_points where run = $1 and key = k.key
      and at >= coalesce($3, '-infinity'::timestamptz)
      and step between $5::int and $6::int order by step limit 1) f,
    (select step from metric_points where run = $1 and key = k.key
      and at >= coalesce($3, '-infinity'::timestamptz)
      and step between $5::int and $6::int order by step desc limit 1) l
) r
cross join lateral (
  select generate_series(r.first, r.last, greatest(1, (r.last - r.first) / $4::int)) as step
  union all select r.last
) wanted
cross join lateral (
  select step, value from metric_points p
  where p.run = $1 and p.key = k.key and p.step between wanted.step and r.last order by step limit 1
) m
order by k.key, m.step

-- Of each metric, at most $2 points that are evenly apart, with the first and the last one. Values that are not
-- finite are left out.

-- name: metric_histories
select distinct k.key, m.step, m.value, m.at
from unnest($3::text[]) as k (key)
cross join lateral (
  select f.step as first, l.step as last
  from (select step from metric_points where run = $1 and key = k.key
      and value > '-Infinity' and value < 'Infinity' order by step limit 1) f,
    (select step from metric_points where run = $1 and key = k.key
      and value > '-Infinity' and value < 'Infinity' order by step desc limit 1) l
) r
cross join lateral (
  select generate_series(r.first, r.last, (r.last - r.first) / ($2::int - 1) + 1) as step
  union all select r.last
) wanted
cross join lateral (
  select step, value, at from metric_points p
  where p.run = $1 and p.key = k.key and p.step between wanted.step and r.last
    and p.value > '-Infinity' and p.value < 'Infinity' order by step limit 1
) m
order by k.key, m.step

-- The least and the largest value of each metric, over all its points.

-- name: metric_extremes
select key, min(value) as least, max(value) as most from metric_points
where run = $1 and key = any($2::text[]) and value > '-Infinity' and value < 'Infinity' group by key

-- The values of a metric of several runs at some steps. Each is looked up by the key of the table.

-- name: values_at
select m.run, m.step, m.value from unnest($1::text[]) as r (run) cross join unnest($3::int[]) as s (step)
join metric_points m on m.run = r.run and m.key = $2 and m.step = s.step order by m.step, r.run

-- What is marked on the curves of a run: its newest checkpoints and warnings.

-- name: marks
(select step, 'checkpoint' as kind, '' as text from checkpoints
 where run = $1 and step between $2 and $3 order by step desc limit $4)
union all
(select step, 'warning', left(message, 200) from log_lines
 where run = $1 and level = 'warning' and step between $2 and $3
 order by xid desc, position desc, line desc limit $4)

-- name: recent_means
select key, avg(value)::float8 as mean from metric_points
where run = $1 and key = any ($2) and step > $3 and value <> 'NaN' group by key

-- name: ends
select k.key, f.step as first_step, f.value as first, l.step as last_step, l.value as last
from unnest($2::text[]) as k (key)
cross join lateral (select step, value from metric_points m where m.run = $1 and m.key = k.key
  order by step limit 1) f
cross join lateral (select step, value from metric_points m where m.run = $1 and m.key = k.key
  order by step desc limit 1) l

-- name: total
select sum(value) from metric_points where run = $1 and key = $2 and value <> 'NaN'

-- name: last_steps
select k.key, (select max(step) from metric_points m where m.run = $1 and m.key = k.key) as step
from unnest($2::text[]) as k (key)

-- name: new_points
select k.key, m.step, m.value from unnest($2::text[], $3::int[]) as k (key, last)
cross join lateral (select step, value from metric_points p where p.run = $1 and p.key = k.key
  and p.step > k.last order by step limit 2000) m
order by k.key, m.step

-- part: select_checkpoints
select c.step, coalesce(r.name, c.run) || '@' || c.step as ref, c.reward, c.uri,
  c.manifest_sha256, c.adapter_sha256, c.created_at, h.status as hub_status,
  h.repository as hub_repository, h.url as hub_url, h.revision as hub_revision, h.error as hub_error,
  h.requested_by as hub_requested_by
from checkpoints c left join runs r using (run) left join lateral (
  select status, repository, url, revision, error, requested_by from hub_uploads u
  where u.run = c.run and u.step = c.step order by u.created_at desc, u.upload limit 1) h on true

-- name: checkpoints
{select_checkpoints} where c.run = $1 order by c.step

-- The newest checkpoints, the best one, and those of some steps.

-- name: chosen_checkpoints
{select_checkpoints} where c.run = $1 and c.step in (
  (select step from checkpoints where run = $1 order by step desc limit $2)
  union all (select step from checkpoints where run = $1 and reward <> 'NaN'
    order by reward desc, step desc limit 1)
  union all select unnest($3::int[]))
order by c.step desc

-- name: count_checkpoints
select count(*) from checkpoints where run = $1

-- name: hub_uploads
select u.upload as id, coalesce(r.name, u.run) || '@' || u.step as ref, u.repository, u.form, u.visibility,
  u.status, u.url, u.revision, u.error, e.error as waiting, u.requested_by, u.created_at, u.updated_at
from hub_uploads u left join runs r using (run)
left join effects e on e.run_id = u.upload and u.status = 'requested'
where u.run = $1 and ($2::int is null or u.step = $2) order by u.created_at desc, u.upload limit 100

-- name: groups
select *, sum(num_samples) over () as total from (
  select step, slot, replacement, dataset_row, artifact, grades, judgements, num_samples,
    sum(num_samples) over (order by step, slot, replacement) - num_samples as first
  from graded_groups where owner = $1 and purpose = $2
    and ($3::int is null or step = $3)
) g order by first

-- name: groups_before
select step, slot, replacement, dataset_row, artifact, grades, judgements, 0 as first
from graded_groups where owner = $1 and purpose = $2 and (step, slot, replacement) <= ($3, $4, $5)
order by step desc, slot desc, replacement desc limit $6

-- A group whose samples were refuted was generated again under its replacement + 1000 (schemas.ids.REFUTED),
-- and is left out.

-- name: groups_after
select step, slot, replacement, dataset_row, artifact, grades, judgements, 0 as first
from graded_groups g where owner = $1 and purpose = $2 and (step, slot, replacement) > ($3, $4, $5)
  and step <= $6 and not exists (
    select from graded_groups again where again.owner = g.owner and again.purpose = g.purpose
      and again.step = g.step and again.slot = g.slot and again.replacement = g.replacement + 1000)
order by step, slot, replacement limit $7

-- The nearest groups of one dataset row before and after a step. Each side looks at a bounded number of
-- groups, because no index holds the rows of a dataset.

-- name: groups_of_row
select step, slot, replacement from (
  (select step, slot, replacement, dataset_row from graded_groups
   where owner = $1 and purpose = $2 and step < $4 order by step desc limit 5000)
  union all
  (select step, slot, replacement, dataset_row from graded_groups
   where owner = $1 and purpose = $2 and step >= $4 order by step limit 5000)
) near where dataset_row = $3 order by abs(step - $4), slot, replacement limit 24

-- name: newest_graded_step
select max(step) from graded_groups where owner = $1 and purpose = $2

-- name: grades_of_steps
select wanted.step, g.slot, g.replacement, g.grades from unnest($2::int[]) as wanted (step) cross join lateral (
  select slot, replacement, grades from graded_groups
  where owner = $1 and purpose = 'train' and step = wanted.step
  order by slot, replacement limit 50
) g order by wanted.step, g.slot, g.replacement

-- name: groups_of_evaluation
select step, slot, replacement, dataset_row, artifact, grades, attempts, judgements
from graded_groups where owner = $1 and purpose = 'evaluate' order by slot, replacement

-- name: count_groups
select count(*) from graded_groups where owner = $1 and purpose = $2

-- name: older_log_lines
select xid, position, line, at as timestamp, level, step, message from log_lines
where run = $1 and (xid, position, line) < ($2, $3, $4)
and ($6::text is null or level = $6)
order by xid desc, position desc, line desc limit $5

-- name: newer_log_lines
select xid, position, line, at as timestamp, level, step, message from log_lines
where run = $1 and (xid, position, line) > ($2, $3, $4)
and ($6::text is null or level = $6)
order by xid asc, position asc, line asc limit $5


-- == Datasets, workspaces, evaluations ====================================================================

-- Datasets, and uploads that are not datasets yet.

-- part: datasets_and_uploads
(select dataset as id, name, 'uploaded' as status, null as error, file_name, file_size,
   num_rows, columns, ref::json -> 'content' ->> 'sha256' as sha256, created_at, workspace, organisation, version,
   coalesce(series, dataset) as series,
   not exists (select from datasets n where n.series = coalesce(e.series, e.dataset) and n.version > e.version)
     as is_newest
 from datasets e
 union all
 select id, name, case when u.status = 'pending' and exists (select from upload_parts p where p.upload = u.id)
     then 'uploading' else status end, error, file_name, file_size, null::integer, null, null,
   created_at, workspace, organisation, null::integer, coalesce(u.series, u.id), true
 from dataset_uploads u
 where status <> 'cancelled' and u.dataset is null
   and not exists (select from datasets d where d.dataset = u.id))

-- A dataset that belongs to no workspace is shared within its organisation.

-- part: dataset_to_show
($1::text[] is null or d.workspace = any($1)
  or d.workspace is null and coalesce(d.organisation, 'main') = $2::text)

-- Of each dataset the newest version.

-- name: page_of_datasets
select * from {datasets_and_uploads} d
where {dataset_to_show} and is_newest order by created_at desc, id limit $3 offset $4

-- name: count_datasets
select count(*) from {datasets_and_uploads} d where {dataset_to_show} and is_newest

-- name: dataset
select d.*, (select w.name from workspaces w where w.workspace = d.workspace) as workspace_name
from {datasets_and_uploads} d
where (id = $3 or name = $3 and case when $4::integer is null then is_newest else version = $4 end)
  and {dataset_to_show}
order by (id = $3) desc, (status = 'uploaded') desc, created_at limit 100

-- name: versions_of_dataset
select * from {datasets_and_uploads} d
where series = $3 and status = 'uploaded' and {dataset_to_show} order by version desc

-- Published versions of artifacts. The latest version is the highest release, or else the highest pre-release.

-- part: artifact
a.artifact as id, a.organisation, a.kind, a.name, a.semver as version, a.is_prerelease, a.sha256,
  a.file_size as size, a.num_files, a.unpacked_bytes, a.summary, a.publisher as published_by, a.created_at

-- part: latest_artifacts
(select distinct on (a.kind, a.name) {artifact},
   count(*) over (partition by a.kind, a.name)::int as num_versions
 from published_artifacts a where a.organisation = $1 and ($2::text is null or a.kind = $2)
 order by a.kind, a.name, a.is_prerelease, a.precedence desc)

-- part: by_name_up
l.name, l.kind

-- part: by_name_down
l.name desc, l.kind desc

-- part: by_created_at_up
l.created_at, l.id

-- part: by_created_at_down
l.created_at desc, l.id

-- name: page_of_artifacts
select * from {latest_artifacts} l where ($3::text is null or l.name || ' ' || l.summary ilike $3)
order by {order: by_name_up | by_name_down | by_created_at_up | by_created_at_down} limit $4 offset $5

-- name: count_artifacts
select count(*) from {latest_artifacts} l where ($3::text is null or l.name || ' ' || l.summary ilike $3)

-- name: versions_of_artifact
select {artifact}, count(*) over ()::int as num_versions from published_artifacts a
where a.organisation = $1 and a.kind = $2 and a.name = $3 order by a.precedence desc

-- name: latest_artifact
select a.semver from published_artifacts a where a.organisation = $1 and a.kind = $2 and a.name = $3
order by a.is_prerelease, a.precedence desc limit 1

-- name: announce_upload
insert into dataset_uploads as u (id, name, file_name, status, workspace, organisation)
values ($1, $2, $3, 'pending', $4, $5) on conflict (id) do update
set file_name = excluded.file_name, status = 'pending', error = null,
  uploader = null, rejected_at = null, issues = null
where $4::text is null or u.workspace = $4
returning id

-- name: upload
select name, file_name from dataset_uploads
where id = $1 and ($2::text[] is null or workspace = any($2)
  or workspace is null and coalesce(organisation, 'main') = $3::text)

-- name: forget_upload
delete from dataset_uploads where id = $1

-- name: mark_upload
update dataset_uploads set status = $2, error = null where id = $1

-- name: reject_upload
update dataset_uploads
set status = 'error', error = $2, issues = $3, uploader = $4, rejected_at = clock_timestamp()
where id = $1

-- An upload that an earlier version rejected has no `rejected_at`.

-- part: rejected_uploads
(select id, name, file_name, error, issues, uploader, workspace, organisation,
   coalesce(rejected_at, created_at) as rejected_at
 from dataset_uploads where status = 'error')

-- name: page_of_rejected_uploads
select * from {rejected_uploads} d
where {dataset_to_show} order by rejected_at desc, id limit $3

-- name: count_rejected_uploads
select count(*) from {rejected_uploads} d where {dataset_to_show}

-- name: rejected_upload
select * from {rejected_uploads} d where id = $3 and {dataset_to_show}

-- part: select_workspaces
select workspace as id, name, url, status, commit_sha, rollouts,
  nullif(error, '') as error, created_at, updated_at, nullif(forge, '') as forge,
  default_branch, refs_at, nullif(refs_error, '') as refs_error, push_error, status_error,
  coalesce(home.organisation, 'main') as organisation, home.repository from workspaces
left join lateral (
  select o.name as organisation, h.repository from workspace_homes h join organisations o on o.id = h.organisation
  where h.workspace = workspaces.workspace
) home on true
left join lateral (
  select case
    when p.error is not null then p.ref || ' at ' || left(p.after, 12) || ': ' || p.error
    else (select t.config || ' for ' || p.ref || ' at ' || left(p.after, 12) || ': ' || t.detail
      from triggered_runs t where t.push = p.push and t.outcome = 'refused' order by t.trigger limit 1)
    end as push_error
  from pushes p where p.workspace = workspaces.workspace and p.examined order by p.number desc limit 1
) newest on true
left join lateral (
  select 'commit ' || left((select d.data -> 'status' ->> 'sha' from events d
      where d.stream = e.stream and d.data -> 'status' is not null order by d.version desc limit 1), 12)
    || ': ' || (e.data ->> 'error') as status_error
  from events e where e.run_id = workspaces.workspace
    and e.type in ('rl.status.posted', 'rl.workspace.connected', 'rl.workspace.disconnected')
  order by e.xid desc, e.position desc limit 1
) answered on true

-- name: page_of_workspaces
{select_workspaces} where $1::text[] is null or workspace = any($1)
order by created_at desc, workspace limit $2 offset $3

-- name: count_workspaces
select count(*) from workspaces where $1::text[] is null or workspace = any($1)

-- name: workspace
{select_workspaces} where (workspace = $1 or name = $1) and ($2::text[] is null or workspace = any($2))
order by (workspace = $1) desc, created_at limit 100

-- name: refs_digests
select workspace, refs_digest as digest, nullif(refs_error, '') as error from workspaces
where workspace = any($1)

-- What arrived about a repository, and the moves of refs that no webhook told. A delivery is joined with
-- the newest move of its ref to its commit.

-- name: page_of_deliveries
with moves as (
  select * from pushes where workspace = $1 and not baseline),
entries as (
  select d.at, d.kind, d.forge, d.delivery, d.ref, d.before, d.after, d.forced, d.pusher,
    d.event, p.push from deliveries d
  left join lateral (select push from moves m where m.ref = d.ref and m.after is not distinct from d.after
    and d.kind = 'push' order by m.number desc limit 1) p on true
  where d.workspace = $1 and d.kind in ('push', 'ping')
  union all
  select m.at, 'found', null, null, m.ref, m.before, m.after, false, null, m.push, m.push from moves m
  where not exists (select from deliveries d where d.workspace = $1 and d.kind = 'push'
    and d.ref = m.ref and d.after is not distinct from m.after))
select e.at, e.kind, e.forge, e.delivery, e.ref, e.before, e.after, e.forced, e.pusher,
  m.number, coalesce(m.examined, false) as examined, m.reason, m.error,
  coalesce(e.at > w.refs_at or w.refs_at is null, true) as unlisted,
  nullif(w.refs_error, '') as refs_error, count(*) over () as total,
  coalesce((select json_agg(json_build_object('trigger', t.trigger, 'config', t.config, 'run', t.run,
      'run_name', coalesce(r.name, t.run_name), 'outcome', t.outcome, 'detail', nullif(t.detail, ''),
      'status', r.status, 'commit_state', t.commit_state, 'commit_text', t.commit_text) order by t.trigger)
    from triggered_runs t left join runs r on r.run = t.run where t.push = e.push), '[]')::text as runs
from entries e left join moves m on m.push = e.push left join workspaces w on w.workspace = $1
where ($4::text is null or e.kind = $4) and ($5::text is null or e.ref ilike $5)
order by e.at desc, e.event limit $2 offset $3

-- The triggers that the newest pushes of a repository matched, each with what became of the last one.

-- name: triggers
select t.config, t.trigger, t.matched, t.submitted, t.ref, t.after, t.at, t.outcome,
  nullif(t.detail, '') as detail, t.run, coalesce(r.name, t.run_name) as run_name, r.status as run_status,
  t.commit_state, t.commit_text
from (select t.*, p.ref, p.after, p.at,
    row_number() over (partition by t.config, t.trigger order by p.number desc) as place,
    count(*) over (partition by t.config, t.trigger) as matched,
    count(*) filter (where t.outcome = 'submitted') over (partition by t.config, t.trigger) as submitted
  from (select * from pushes where workspace = $1 order by number desc limit 1000) p
  join triggered_runs t on t.push = p.push) t
left join runs r on r.run = t.run
where t.place = 1 order by t.at desc, t.config, t.trigger limit 50

-- Evaluations that users asked for have no run; those of a run belong to the run.

-- part: select_evaluations
select evaluation as id, name, status, model,
  dataset || coalesce('@' || (dataset_ref::json ->> 'version'), '') as dataset,
  coalesce((dataset_ref::json ->> 'version')::int, 1) as dataset_version,
  dataset_ref::json ->> 'dataset' as dataset_id, rollout, reward, metrics,
  created_at, started_at, case when status <> 'running' then completed_at end as completed_at,
  nullif(error, '') as error, config, total, dataset_ref, config::json -> 'advanced' ->> 'project' as project,
  (select count(distinct g.slot) from graded_groups g where g.owner = e.evaluation and g.purpose = 'evaluate')
  as completed from evaluations e

-- part: in_workspace
coalesce(e.workspace, (select r.workspace from runs r where r.run = e.run)) = any($1::text[])

-- part: in_any_workspace
$1::text[] is null

-- name: page_of_evaluations
{select_evaluations} where run is null and {evaluation_to_show: in_workspace | in_any_workspace}
and ($4::text is null or config::json -> 'advanced' ->> 'project' = $4)
order by created_at desc, evaluation limit $2 offset $3

-- name: count_evaluations
select count(*) from evaluations e
where run is null and {evaluation_to_show: in_workspace | in_any_workspace}
and ($2::text is null or config::json -> 'advanced' ->> 'project' = $2)

-- name: evaluation
select x.*, r.run as validated_run, w.name as workspace_name from ({select_evaluations}
where (evaluation = $2 or name = $2)
and {evaluation_to_show: in_workspace | in_any_workspace}
order by (evaluation = $2) desc, created_at desc limit 100) x
join evaluations r on r.evaluation = x.id left join workspaces w on w.workspace = r.workspace
order by (x.id = $2) desc, x.created_at desc


-- == Dead letters =========================================================================================

-- part: select_letters
select letter as id, version, consumer, message_type, about, cause, pauses, created_at, redriven_at
from dead_letters

-- part: letters_to_show
($1 or redriven_at is null) and ($2::text is null or about = $2)

-- name: page_of_letters
{select_letters} where {letters_to_show} order by created_at desc, letter limit $3 offset $4

-- name: count_letters
select count(*) from dead_letters where {letters_to_show}

-- name: letters_that_begin_with
{select_letters} where starts_with(letter, $1) order by letter limit 2

-- name: count_waiting_letters
select count(*) from dead_letters where redriven_at is null


-- == The platform =========================================================================================

-- name: clock_time
select clock_timestamp()

-- name: workers
select id, host, pid, lanes, extract(epoch from expires_at - clock_timestamp())::float8 as remaining
from workers where expires_at > clock_timestamp() order by started_at

-- name: database_size
select pg_database_size(current_database())

-- How many events lie above the cursor `m`. They are counted up to $1, because this is asked every few
-- seconds; beyond that it is the number of positions given since (a transaction that was rolled back leaves a
-- gap).

-- part: events_above
(select case when c.above < $1 then c.above else greatest(c.above, coalesce((select position
    from events order by xid desc, position desc limit 1), 0) - m.position) end
 from (select count(*) as above from (select from events e
       where (e.xid, e.position) > (m.xid, m.position)
       order by e.xid, e.position limit $1) found) c)

-- name: lag
select m.consumer, {events_above} as lag from watermarks m

-- name: relay
select extract(epoch from clock_timestamp() - m.seen_at)::float8 as seen_s,
  {events_above} as behind from relay m

-- name: behind
select {events_above} from (select 1) one
left join watermarks w on w.consumer = $2
cross join lateral (select coalesce(w.xid, '0'::xid8) as xid, coalesce(w.position, 0) as position) m

-- name: count_skipped_events
select event_type, count(*) from skipped_events where projection = $1
group by event_type order by event_type

-- name: skipped_events
select event_type, stream, version, run, error from skipped_events
where projection = $1 order by xid, position limit $2

-- The events that an older projector left, and that this release knows: it knows these types up to these versions.

-- name: left_for_newer
select s.stream, s.version from skipped_events s
join events e on e.stream = s.stream and e.version = s.version
join unnest($2::text[], $3::integer[]) as k (type, version)
    on k.type = e.type and k.version >= e.schema_version
where s.projection = $1 and s.error like 'NewerEvent:%'
order by s.xid, s.position

-- name: bus_lag
select consumers, records from bus_lag order by consumers

-- name: bus_skips
select reason, count from bus_skips order by reason

-- name: horizon_age_s
select horizon_age_s()

-- Running runs of several workspaces may have the same name; a metric then also names the run by its id.

-- part: metric_name
case when exists (select from runs o where o.name = r.name and o.run <> r.run and o.status = 'running')
  then r.name || ' (' || r.run || ')' else r.name end as name

-- name: metrics_of_last_steps
select {metric_name}, m.key, m.value from runs r join metric_points m
on m.run = r.run and m.step = r.current_step where r.status = 'running'
and (m.key like 'time/%' or m.key in ('train/lag', 'rollout/raw_reward'))

-- name: tokens_per_s
with recent as (select {metric_name}, r.run, m.step, m.value, m.at,
    min(m.step) over (partition by r.run) as first from runs r join metric_points m
    on m.run = r.run and m.key = 'rollout/tokens' and m.step > r.current_step - $1
    where r.status = 'running')
select name, sum(value) filter (where step > first)
    / extract(epoch from max(at) - min(at))::float8 as rate from recent
group by run, name having max(at) > min(at)

-- name: count_runs_by_status
select status, count(*) from runs group by status

-- name: announce_worker
insert into worker_doors (worker, url, key) values ($1, $2, '')
on conflict (worker) do update set url = excluded.url, key = '', updated_at = clock_timestamp()

-- name: forget_old_workers
delete from worker_doors d where not exists (select from workers w
where w.id = d.worker) and updated_at < clock_timestamp() - interval '1 hour'

-- A worker of an earlier version has a key of its own, and knows no grants.
-- name: live_workers
select d.worker, d.url from worker_doors d join workers w on w.id = d.worker
where w.expires_at > clock_timestamp() and d.key = '' order by d.updated_at desc

-- name: grant_chat
with expired as (delete from chat_grants where expires_at < clock_timestamp())
insert into chat_grants (sha256, worker, expires_at)
values ($1, $2, clock_timestamp() + make_interval(secs => $3))

-- name: redeem_chat
delete from chat_grants where sha256 = $1 and worker = $2 and expires_at > clock_timestamp()
returning true



-- == What a run waits for =================================================================================

-- The facts about a run ($1; null: about the platform as a whole). $2 is the stream of the run, under which
-- it requested the fetch of its commit. At most 200 effects are read. Watermarks move every few seconds, so
-- an event that is younger than 15 seconds may have been consumed above one. Whether events are hidden is asked
-- of the newest one: an `exists` over the horizon reads the whole log when nothing is hidden.

-- name: facts
select
  (select case when g.state = 'open' and g.holds > 0 then 'paused' else g.state end
   from run_gates g where g.run_id = $1) as gate,
  (select json_agg(json_build_object('id', d.letter, 'consumer', d.consumer, 'cause', d.cause))
   from dead_letters d where d.pauses and d.redriven_at is null and ($1::text is null or d.about = $1))
   as letters,
  (select json_agg(json_build_object('type', e.type, 'lane', e.lane, 'worker', e.worker,
     'lease_s', e.lease_s, 'due_s', e.due_s, 'attempts', e.attempts, 'deaths', e.deaths,
     'error', e.error, 'group', e.of_group, 'silent_s', e.silent_s))
   from (select e.type, e.lane, e.worker, e.attempts, e.deaths, e.error,
           e.data -> 'spec' ->> 'group' as of_group,
           extract(epoch from w.expires_at - clock_timestamp())::float8 as lease_s,
           extract(epoch from e.due_at - clock_timestamp())::float8 as due_s,
           case when e.worker is not null
             then extract(epoch from clock_timestamp() - e.progressed_at)::float8 end as silent_s
         from effects e left join workers w on w.id = e.worker
         where ($1::text is null and not e.shut) or (e.run_id = $1 or
           (e.lane = 'control' and e.type in ('FetchCommit', 'DiscoverRollouts')
           and e.data ->> 'requester' = $2))
         order by e.due_at limit 200) e) as effects,
  (select json_agg(json_build_object('id', w.id, 'host', w.host, 'pid', w.pid, 'lanes', w.lanes,
     'lease_s', extract(epoch from w.expires_at - clock_timestamp())::float8, 'decider', w.decider,
     'held', (select count(*) from effects e where e.worker = w.id)))
   from workers w where w.expires_at > clock_timestamp()) as workers,
  coalesce(coalesce(
    (select v.xid from events v where $1::text is null order by v.xid desc, v.position desc limit 1),
    (select v.xid from events v where v.run_id = $1 order by v.xid desc, v.position desc limit 1)
  ) >= (select own_horizon(pg_current_snapshot())), false) as hidden,
  (select json_agg(m.consumer order by m.consumer) from watermarks m,
     (select v.id, v.xid, v.position, v.time from events v where v.run_id = $1
      order by v.xid desc, v.position desc limit 1) last
   where (m.xid, m.position) < (last.xid, last.position) and m.consumer <> 'project'
     and last.time < clock_timestamp() - interval '15 seconds'
     and not exists (select from inbox i where i.consumer = m.consumer and i.event_id = last.id))
   as undecided,
  (select extract(epoch from clock_timestamp() - r.seen_at)::float8 from relay r) as seen_s,
  (select json_agg(json_build_object('run', n.run_id, 'decider', n.decider))
   from (select g.run_id, g.decider from run_gates g
         where g.decider > 1 and g.state <> 'closed' and ($1::text is null or g.run_id = $1)
         order by g.decider desc, g.run_id limit 3) n) as newer

-- The samples that the runs of a run's workspace may have in flight, and those that they have, if its next
-- sample has to wait for others of them. $2 is the limit of a workspace that has none of its own.

-- name: full_quota
select q.most, q.used from (
  select sample_limit(g.workspace, $2) as most,
    (select coalesce(sum(e.size), 0) from effects e join run_gates o on o.run_id = e.run_id
     where e.lane = 'generate' and e.worker is not null and o.workspace = g.workspace) as used,
    (select min(e.size) from effects e
     where e.run_id = g.run_id and e.lane = 'generate' and e.worker is null and not e.shut) as next
  from run_gates g where g.run_id = $1) q
where q.used + q.next > q.most and (q.used > 0 or q.most = 0)

-- The first event that the projector skipped because a newer release wrote it, and that a consumer has not consumed for
-- 15 seconds. A run that began under a newer release is told of by its decider version.

-- name: first_newer_event
select e.stream || '/' || e.version as event, e.type, e.schema_version as version
from skipped_events s join events e on e.stream = s.stream and e.version = s.version
where s.projection = 'project' and s.error like 'NewerEvent:%'
  and not exists (select from run_gates g where g.run_id = e.run_id and g.decider > 1)
  and e.time < clock_timestamp() - interval '15 seconds'
  and exists (select from watermarks m
    where m.consumer <> 'project' and (m.xid, m.position) < (e.xid, e.position)
      and not exists (select from inbox i where i.consumer = m.consumer and i.event_id = e.id))
order by s.xid, s.position limit 1

-- The first event of a run whose type or version is not among those that this release knows.

-- name: first_unknown_event
select e.stream || '/' || e.version as event, e.type, e.schema_version as version from events e
where e.run_id = $1 and not exists (
    select from unnest($2::text[], $3::integer[]) as k (type, version)
    where k.type = e.type and k.version >= e.schema_version)
order by e.xid, e.position limit 1

-- How many samples of a run's step have been graded, of how many. A group that takes the place of another one
-- counts once.

-- name: step_samples
select (config::json -> 'training' ->> 'n_samples_per_prompt')::int * (
    select count(distinct slot) from graded_groups where owner = $1 and purpose = 'train' and step = $2)
    as graded,
  (config::json -> 'training' ->> 'n_samples_per_prompt')::int
    * (config::json -> 'training' ->> 'rollout_batch_size')::int as total
from runs where run = $1

-- Effects that live workers hold without progress for longer than their lane allows.

-- name: stalled_effects
select e.id::text as id, e.epoch, e.type, e.lane, e.run_id as run, e.worker, s.seconds
from effects e
join unnest($1::text[], $2::float8[]) as l (lane, most_s) on l.lane = e.lane
join workers w on w.id = e.worker and w.expires_at > clock_timestamp()
cross join lateral (select extract(epoch from clock_timestamp() - e.progressed_at)::float8 as seconds) s
where e.worker is not null and s.seconds > l.most_s
order by s.seconds desc limit 100

-- name: horizon_holders
select current_database()::text as database, username, pid, name, application, address,
  extract(epoch from clock_timestamp() - since)::float8 as since_s from horizon_holders()


-- == What the projector writes ============================================================================

-- name: cursor
select xid, position from watermarks where consumer = $1

-- name: begin_cursor
insert into watermarks (consumer, xid, position) values ($1, $2, $3) on conflict do nothing

-- name: move_cursor
update watermarks set xid = $4, position = $5 where consumer = $1 and xid = $2 and position = $3

-- name: forget_cursor
delete from watermarks where consumer = $1

-- name: forget_skipped_events
delete from skipped_events where projection = $1

-- Rows of one kind (`infra/readmodel/rows.py`): its fields are the columns. A field of a change that is null
-- leaves the column as it is.

-- name: put_rows
insert into {table: ...} ({columns: ...}) select * from unnest({arrays: ...})
on conflict do nothing

-- name: change_rows
update {table: ...} t set {changes: ...} from unnest({arrays: ...}) as c ({columns: ...})
where t.{key: ...} = c.{key: ...}

-- A change by an event of an earlier release, when a name was unique in the installation: a request failed, or
-- the holder of the name has undeployed.

-- name: change_named_deployment
update deployments set updated_at = $2, pending = '', request = '', error = $4,
  status = case when $4 = '' then 'inactive' else status end
where deployment = $1 and case when $4 = '' then status = 'active' or pending <> '' else request = $3 end

-- name: empty_tables
truncate {tables: ...}

-- What is removed because its events left the log.

-- name: drop_log_lines_without_events
delete from log_lines l
where (l.run = $1 or l.run in (select evaluation from evaluations where run = $1)) and not exists (
  select from events e where e.xid = l.xid::text::xid8 and e.position = l.position)

-- name: drop_skipped_events_without_events
delete from skipped_events s
where (s.run = $1 or s.run in (select evaluation from evaluations where run = $1)) and not exists (
  select from events e where e.xid = s.xid::text::xid8 and e.position = s.position)

-- name: drop_skipped_event
delete from skipped_events where event = $1

-- The costs of an archived run are sums with an id of their own: that of its notice, and a number. The events of
-- its checkpoints and verifications stay in the log, and so do their costs.

-- name: drop_costs_without_events
delete from costs where owner = $1 and event not like '%/%'
  and coalesce(effect, '') not in ('SaveCheckpoint', 'VerifyRun')

-- name: drop_sums_of_costs
delete from costs where owner = $1 and event like '%/%'

-- name: drop_costs
delete from costs where owner = $1

-- name: drop_groups
delete from graded_groups
where owner = $1 or owner in (select evaluation from evaluations where run = $1)

-- name: drop_replaced_groups
delete from graded_groups where owner = $1 and purpose = 'evaluate' and replacement < $2

-- name: drop_run_alerts
delete from alerts where run = $1

-- name: drop_run_shares
delete from run_shares where run = $1

-- name: drop_run_notes
delete from run_notes where run = $1

-- name: drop_given_secrets
delete from run_secrets s using unnest($1::text[], $2::timestamptz[]) as ended (owner, at)
where s.owner = ended.owner and s.created_at <= ended.at

-- name: drop_evaluations
delete from evaluations where run = $1

-- name: drop_metrics
delete from metric_points where run = $1

-- name: drop_log_lines
delete from log_lines where run = $1

-- name: drop_checkpoints
delete from checkpoints where run = $1

-- name: drop_hub_uploads
delete from hub_uploads where run = $1

-- name: drop_run
delete from runs where run = $1

-- name: drop_dataset
delete from datasets where dataset = $1

-- name: drop_artifact
delete from published_artifacts where artifact = $1

-- name: unarchive_run
update runs set archived_at = null where run = $1

-- The checkpoints of all runs.

-- part: checkpoints_to_show
($1::text[] is null or r.workspace = any($1::text[]))
and ($2::text is null or r.config::json -> 'advanced' ->> 'tuning' = $2)

-- name: page_of_checkpoints
select c.run, r.name as run_name, c.step, r.name || '@' || c.step as ref, r.model,
  r.config::json -> 'advanced' ->> 'tuning' as tuning, r.workspace, c.reward, c.adapter_sha256, c.created_at
from checkpoints c join runs r using (run) where {checkpoints_to_show}
order by c.created_at desc, c.run, c.step desc limit $3 offset $4

-- name: count_all_checkpoints
select count(*) from checkpoints c join runs r using (run) where {checkpoints_to_show}
