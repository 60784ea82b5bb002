"""Finds the runs, evaluations and deployments that need a run or a dataset, so that it is not deleted.

The search for runs and evaluations reads the log itself, by the first events of everything that has a
name. It misses nothing, because a name is taken before anything is appended under it. Deployments are
those that the read model has.
"""

from infra.ports.actor import visible_workspaces
from infra.spine.ports.visible_workspaces import all_rows
from infra.spine.postgres.pool import Database

SHOWN = 5
"""How many names a refusal lists."""

HIDDEN = "some of another workspace"
"""The text in the place of names that the sender may not see."""

STARTED = """
select n.name, n.scope from names n join events e on e.stream = 'run-' || n.id and e.version = 1
where n.kind = 'run' and n.id <> $1
  and (e.data -> 'model' ->> 'kind' = 'checkpoint'
       and split_part(e.data -> 'model' ->> 'name', '@', 1) = $1
        or split_part(e.data -> 'teacher' ->> 'checkpoint', '@', 1) = $1
        or exists (select from json_array_elements(e.data -> 'reward_models') m
                   where split_part(m ->> 'checkpoint', '@', 1) = $1
                      or m -> 'base' ->> 'kind' = 'checkpoint'
                         and split_part(m -> 'base' ->> 'name', '@', 1) = $1))
order by n.created_at limit $2
"""

FORKED = """
select n.name, n.scope from names n join events e on e.stream = 'run-' || n.id and e.version = 1
where n.kind = 'run' and e.data -> 'fork' ->> 'parent' = $1
  and ($3 or not exists (select from events a where a.stream = e.stream and a.version = 2
                         and a.type = 'rl.run.archived'))
order by n.created_at limit $2
"""

EVALUATING = """
select n.name, n.scope from names n join events e on e.stream = 'eval-' || n.id and e.version = 1
left join evaluations v on v.evaluation = n.id
where n.kind = 'evaluation' and coalesce(v.status, 'pending') in ('pending', 'running')
  and e.data -> 'template' -> 'model' ->> 'kind' = 'checkpoint'
  and split_part(e.data -> 'template' -> 'model' ->> 'name', '@', 1) = $1
order by n.created_at limit $2
"""

SERVED = """
select d.deployment as name, d.workspace as scope
from deployments d
where d.status = 'active' and d.served::json ->> 'run' = $1
  or exists (select from names n where n.kind = 'run' and n.id = $1
               and n.name = split_part(d.pending, '@', 1) and n.scope = coalesce(d.workspace, ''))
order by number limit $2
"""

TRAINED_ON = """
select n.name, n.scope from names n join events e on e.stream = 'run-' || n.id and e.version = 1
where n.kind = 'run' and (e.data -> 'dataset' ->> 'dataset' = $1
                          or e.data -> 'validation' ->> 'dataset' = $1)
order by n.created_at limit $2
"""

MEASURED_ON = """
select n.name, n.scope from names n join events e on e.stream = 'eval-' || n.id and e.version = 1
left join evaluations v on v.evaluation = n.id
where n.kind = 'evaluation' and coalesce(v.status, 'pending') in ('pending', 'running')
  and e.data -> 'template' -> 'dataset' ->> 'dataset' = $1
order by n.created_at limit $2
"""


class Holders:
    """Finds the dependents of a run or dataset. Each method returns at most SHOWN names of
    what the sender may see, and HIDDEN for others."""

    def __init__(self, database: Database) -> None:
        self._pool = database.durable

    async def runs_from(self, run: str) -> list[str]:
        """Return the runs that began from a checkpoint of `run`, learn from one or are paid by one,
        archived ones included. They need it to be verified and to say where they come from."""
        return await self._names(STARTED, run)

    async def forks_of(self, run: str, *, archived: bool) -> list[str]:
        """Return the forks of a run, whose states begin with its history; `archived` ones too, or
        not."""
        return await self._names(FORKED, run, archived)

    async def evaluations_of(self, run: str) -> list[str]:
        """Return the evaluations of a checkpoint of `run` that have not ended."""
        return await self._names(EVALUATING, run)

    async def deployments_of(self, run: str) -> list[str]:
        """Return the deployments that serve a checkpoint of `run`, or are loading one."""
        return await self._names(SERVED, run)

    async def runs_on(self, dataset: str) -> list[str]:
        """Return the runs that train or validate on a dataset, ended and archived ones included."""
        return await self._names(TRAINED_ON, dataset)

    async def evaluations_on(self, dataset: str) -> list[str]:
        """Return the evaluations on a dataset that have not ended."""
        return await self._names(MEASURED_ON, dataset)

    async def _names(self, sql: str, identity: str, *more: object) -> list[str]:
        with all_rows():  # whether an evaluation of others has ended says a row of theirs
            rows = await self._pool.fetch(sql, identity, SHOWN, *more)
        visible = visible_workspaces()
        shown = [row["name"] for row in rows if visible is None or row["scope"] in visible]
        return shown + [HIDDEN] * (len(shown) < len(rows))
