"""Reward health: how the rewards of some steps of a run are spread, and what failed in them."""

from collections import Counter
from collections.abc import Mapping, Sequence

from pydantic_core import to_jsonable_python
from starlette.requests import Request
from starlette.responses import Response

from producers.core.history.sample_search import GRADES
from producers.dashboard.charts import scatter
from producers.dashboard.lengths import Lengths, read_lengths
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.responses import ApiResponse
from producers.http.routes.runs import find_run_with_history, services
from schemas.sampling import Grade

SHOWN_STEPS = 40
BINS = 10
HEIGHT = 20
SCATTER = {"width": 400.0, "height": 150.0}


async def index(request: Request) -> Response:
    run, _ = await find_run_with_history(request)
    health = await _health(request)
    lengths = health["lengths"]
    dots = scatter(lengths.points, **SCATTER) if isinstance(lengths, Lengths) else None
    return html(request, "health.html", {"run": run, **health, "scatter": dots})


async def data(request: Request) -> Response:
    """The same figures as JSON."""
    health = await _health(request)
    return ApiResponse(to_jsonable_python(health, inf_nan_mode="null"))


async def _health(request: Request) -> Mapping[str, object]:
    run, _ = await find_run_with_history(request)
    wanted = thinned_steps(run["current_step"] or 0)
    found = await services(request).readmodel.runs.grades_of_steps(run["id"], wanted)
    steps = {
        step: [GRADES.validate_json(grades) for _, grades in groups]
        for step, groups in found.items()
    }
    rewards = [
        reward for groups in steps.values() for group in groups for reward in _rewards(group)
    ]
    least, largest = min(rewards, default=0.0), max(rewards, default=1.0)
    names = [group for groups in found.values() for group, _ in groups]
    return {
        "least": least,
        "largest": largest,
        "steps": [
            {"step": step, **step_health(groups, least, largest)} for step, groups in steps.items()
        ],
        "lengths": await read_lengths(services(request).log, names),
    }


def thinned_steps(last: int) -> list[int]:
    """Some steps of a run that has done `last`, evenly apart and with the last one."""
    count = min(last, SHOWN_STEPS)
    return [last * number // count for number in range(1, count + 1)]


def step_health(
    groups: Sequence[Sequence[Grade]], least: float, largest: float
) -> Mapping[str, object]:
    """The figures of one step. The bins of its histogram are equal parts from `least` to `largest`.
    Its mean counts samples that the policy made fail as 0, as the run's reward does."""
    rewards = [reward for group in groups for reward in _rewards(group)]
    counted = [
        one for group in groups for grade in group if (one := grade.counted_reward) is not None
    ]
    width = (largest - least) / BINS or 1.0
    places = Counter(min(BINS - 1, int((reward - least) / width)) for reward in rewards)
    bins = [places[number] for number in range(BINS)]
    most = max(1, *bins)
    failures = Counter(
        str(grade.failure.category) for group in groups for grade in group if grade.failure
    )
    return {
        "groups": len(groups),
        "mean": sum(counted) / len(counted) if counted else None,
        "same": sum(1 for group in groups if _is_same(group)),
        "bins": bins,
        "heights": [HEIGHT * count / most for count in bins],
        "failures": dict(failures.most_common()),
    }


def _rewards(group: Sequence[Grade]) -> list[float]:
    return [grade.reward for grade in group if grade.reward is not None]


def _is_same(group: Sequence[Grade]) -> bool:
    """Whether all rewards of a group are equal, so that nothing can be learned from it."""
    rewards = _rewards(group)
    return len(rewards) > 0 and min(rewards) == max(rewards)


ROUTES = [
    PageRoute("/runs/{ref}/health", index, scope="read"),
    PageRoute("/runs/{ref}/health.json", data, scope="read"),
]
