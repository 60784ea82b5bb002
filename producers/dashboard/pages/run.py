"""A run: its figures, curves, checkpoints, config and log, and the buttons that control it."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

from pydantic_core import to_jsonable_python
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from infra.readmodel.estimates import HIGH, LOW, Interval, interval_of, is_figure
from infra.readmodel.runs import ALL_STEPS, CurveEnds, RunJson, Runs
from producers.core.history.metric_titles import LOSSES, TITLES, VALIDATION
from producers.core.history.notes import LONGEST_NOTE
from producers.core.history.provenance import Provenance, provenance_of
from producers.dashboard import formats
from producers.dashboard.charts import curves, finite_points, whiskers
from producers.dashboard.forge_links import commit_address
from producers.dashboard.forms import read_session_form
from producers.dashboard.pages.comparisons.forks import first_forks
from producers.dashboard.pages.runs import REWARD, duration_s, progress, progress_text, times_left
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.dashboard.run_config import config_toml, flat_keys
from producers.http.auth import actor_of
from producers.http.requests import cause_of
from producers.http.responses import ApiResponse, number
from producers.http.routes.runs import costs_of, find_run, services, waiting_for
from schemas.algorithms import OFFLINE
from schemas.errors import InvalidConfig, Issue

INTERVAL = (VALIDATION + LOW, VALIDATION + HIGH)
"""The ends of the 95 % interval of the held-out reward."""

DRAWN = (*TITLES, *INTERVAL, *LOSSES)
"""The metrics that the page of a run may draw, with the ends of intervals."""

FIGURES = tuple(TITLES)[:9]
"""The metrics whose newest value is among the figures of the overview."""

FIGURES_OF_ANSWERS = (
    *LOSSES,
    "eval/validation/accuracy",
    "rewards/accuracies",
    "rewards/margins",
    "train/grad_norm",
)
"""The same where the answers of a dataset are learned and nothing is sampled."""

NUM_KEY_FIGURES = 4
"""How many of the figures are always shown. The others are folded."""

SAMPLES = "rollout/num_samples"

TIMES = {
    "time/generate_s": "generate",
    "time/grade_s": "grade",
    "time/learn_s": "learn",
    "time/publish_s": "publish",
    "time/wait_s": "wait",
}
"""The parts of a step's time. In an asynchronous mode the first two overlap with the others."""

SPLIT_STEPS = 50
"""The time of a step is the mean of so many of the newest steps."""

RANGES = {"1h": 3600, "6h": 6 * 3600, "24h": 24 * 3600}
OTHER_RANGES = ("all", "custom")
"""All steps, and those from `first` to `last`."""

DRAWN_POINTS = 600
SVG_POINTS = 120
WIDTH, HEIGHT = 600.0, 150.0
LOG_LINES, MOST_LOG_LINES = 150, 2000
LOG_CHARACTERS, LEAST_LINE = 15_000, 100
"""Characters of the log on the page, so that it stays below 150 KB with everything, and those of a line
that are always shown."""

SHOWN_CHECKPOINTS = 40
MOST_MARKS = 100
MOST_OTHERS = 60
"""Metrics without a curve on the page that it lists."""

ENDED = ("finished", "failed", "crashed", "stopped", "killed")
LEVELS = ("info", "warning", "error")
BUTTONS = {
    "running": ("pause", "stop"),
    "paused": ("resume", "stop"),
    "pending": ("stop",),
}


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of the overview, and how it is written."""

    title: str
    value: float | None
    form: Callable[[float | None], str] = formats.number
    interval: Interval | None = None

    @property
    def text(self) -> str:
        return self.form(self.value)


async def show(request: Request) -> Response:
    run, config = await find_run(request)
    core, now = services(request), services(request).clock.now()
    keys = [key for key in await core.readmodel.runs.metric_keys(run["id"]) if is_figure(key)]
    sampled = await core.readmodel.runs.sampled_curves(
        run["id"], DRAWN, most=SVG_POINTS, since=_since(request, run), steps=_steps(request)
    )
    left = await times_left(core.readmodel.runs, [run], now)
    lines, _ = await core.readmodel.runs.logs(run["id"], limit=LOG_LINES, level=_level(request))
    return html(
        request,
        "run.html",
        {
            "run": run,
            "commit_address": await _commit_address(request, run),
            "progress": progress(run),
            "progress_text": progress_text(run, left.get(run["id"])),
            "figures": await figures_of(core.readmodel.runs, run, now=now),
            "num_key_figures": NUM_KEY_FIGURES,
            "main": drawing(main_keys(run), sampled, is_large=True),
            "curves": [
                drawing((key,), sampled)
                for key in _drawn_keys(run, keys)
                if key not in main_keys(run)
            ],
            "has_curves": main_keys(run)[0] in keys,
            "curve_keys": keys[:50],
            "others": await _other_metrics(request, run, keys),
            "ranges": (*RANGES, *OTHER_RANGES),
            "range": _range(request),
            "state": state_of(run),
            "split": await _time_split(request, run),
            "split_steps": SPLIT_STEPS,
            "provenance": await _provenance(request, run),
            "num_forks": (await first_forks(request, run, most=0))[1],
            **await _checkpoints(request, run),
            "chosen": flat_keys(config),
            "toml": config_toml(config),
            "config": json.dumps(json.loads(config), indent=2, ensure_ascii=False),
            "lines": lines,
            "most_of_line": max(LEAST_LINE, LOG_CHARACTERS // max(1, len(lines))),
            "levels": LEVELS,
            "level": _level(request),
            "ended": ENDED,
            "buttons": _buttons(run),
            "kept_note": await core.readmodel.run_notes.get_notes(run["id"]),
            "may_change": actor_of(request).may("control"),
            "longest_note": LONGEST_NOTE,
            "waits": await waiting_for(request, run["id"], status=run["status"]),
            "cost": (await costs_of(request, [run])).get(run["id"]),
        },
    )


async def _other_metrics(request: Request, run: RunJson, keys: Sequence[str]) -> Sequence[Figure]:
    """The newest values of the metrics that have no curve on the page, such as each reward."""
    drawn = {*TITLES, *TIMES, *main_keys(run)}
    others = [key for key in keys if key not in drawn][:MOST_OTHERS]
    names = [key + end for key in others for end in ("", LOW, HIGH)]
    ends = await services(request).readmodel.runs.ends(run["id"], names)
    return [_newest(ends, key, key) for key in others if key in ends]


async def _time_split(request: Request, run: RunJson) -> Sequence[tuple[str, float, float]]:
    """The parts of a step's time: the name, seconds, and the share of their sum."""
    after = (run["current_step"] or 0) - SPLIT_STEPS
    found = await services(request).readmodel.runs.recent_means(run["id"], list(TIMES), after=after)
    whole = sum(found.values())
    return [(name, found[key], found[key] / whole) for key, name in TIMES.items() if found.get(key)]


async def _provenance(request: Request, run: RunJson) -> Provenance:
    core = services(request)
    if run["archived_at"] is not None:
        return {}
    return await provenance_of(core.readmodel.state_at_event, core.log, run["id"])


async def _commit_address(request: Request, run: RunJson) -> str | None:
    """The page of a run's commit on the forge of its workspace, or None."""
    if run["workspace"] is None or run["commit_sha"] is None:
        return None
    found = await services(request).readmodel.registry.workspace(run["workspace"])
    if found is None:
        return None
    return commit_address(found["url"], run["commit_sha"], forge=found["forge"])


async def _checkpoints(request: Request, run: RunJson) -> Mapping[str, object]:
    """The newest checkpoints of a run, the best one and those that are deployed, how many there are, and
    by step the deployments that serve it, or served it last."""
    core = services(request)
    deployments: dict[int, list[Mapping[str, str]]] = {}
    for one in await core.readmodel.deployments.all_deployments():
        if one.served is not None and one.served.run == run["id"]:
            state = {"name": one.name, "ref": one.ref, "status": one.status}
            deployments.setdefault(one.served.step, []).append(state)
    found, total = await core.readmodel.runs.chosen_checkpoints(
        run["id"], newest=SHOWN_CHECKPOINTS, steps=list(deployments)[:SHOWN_CHECKPOINTS]
    )
    rewards = {
        one["step"]: reward
        for one in found
        if (reward := one["reward"]) is not None and not math.isnan(reward)
    }
    return {
        "checkpoints": found,
        "num_checkpoints": total,
        "best_step": max(rewards, key=lambda step: (rewards[step], step), default=None),
        "deployments": deployments,
    }


def state_of(run: RunJson) -> str:
    """The facts on which the buttons and notes of a run's page depend. An open page is read again when
    they change."""
    return f"{run['status']}, {run['phase']}" + (", error" if run["error"] else "")


def main_keys(run: RunJson) -> tuple[str, ...]:
    """The metrics of the large plot: rewards, or the losses of an algorithm that samples nothing."""
    return tuple(LOSSES) if run["algorithm"] in OFFLINE else (REWARD, VALIDATION)


def _drawn_keys(run: RunJson, keys: Sequence[str]) -> Sequence[str]:
    """The metrics that a page draws, of those that the run has: while it lasts, also those that may
    come."""
    return [key for key in TITLES if key in keys or run["status"] not in ENDED]


def _level(request: Request) -> str | None:
    level = request.query_params.get("level") or None
    if level and level not in LEVELS:
        message = f"must be one of {', '.join(LEVELS)}, got {level[:20]!r}"
        raise InvalidConfig(f"level {message}", issues=(Issue("level", message),))
    return level


async def figures_of(runs: Runs, run: RunJson, *, now: datetime) -> Sequence[Figure]:
    """The figures of the overview. They are those of the whole run, whatever its curves show."""
    if run["algorithm"] in OFFLINE:
        ends = await runs.ends(run["id"], FIGURES_OF_ANSWERS)
        newest = [_newest(ends, key, (TITLES | LOSSES)[key]) for key in FIGURES_OF_ANSWERS]
        return (Figure("Duration", duration_s(run, now), formats.duration), *newest)
    ends = await runs.ends(run["id"], (*FIGURES, *INTERVAL))
    return (
        Figure("Duration", duration_s(run, now), formats.duration),
        Figure("Reward", run["reward"]),
        Figure("Improvement", _improvement(ends.get(REWARD))),
        Figure("Samples", await runs.total(run["id"], SAMPLES)),
        *(_newest(ends, key, TITLES[key]) for key in FIGURES),
    )


def _newest(ends: Mapping[str, CurveEnds], key: str, title: str) -> Figure:
    """The newest value of a metric, with its interval if it has one."""
    if key not in ends:
        return Figure(title, None)
    step, value = ends[key].last
    of_step = {name: one.last[1] for name, one in ends.items() if one.last[0] == step}
    return Figure(title, value, interval=interval_of(of_step, key))


def _improvement(rewards: CurveEnds | None) -> float | None:
    if rewards is None or rewards.first[0] == rewards.last[0]:
        return None
    return rewards.last[1] - rewards.first[1]


def drawing(
    keys: Sequence[str],
    found: Mapping[str, Sequence[tuple[int, float]]],
    *,
    is_large: bool = False,
) -> Mapping[str, object]:
    """The curves of these metrics in common axes, and the 95 % interval of the held-out reward."""
    shown = [found.get(key, ()) for key in keys]
    ends = _interval_points(found) if VALIDATION in keys else ((), ())
    *svgs, low, high = curves([*shown, *ends], width=WIDTH, height=HEIGHT)
    lines = [
        {
            "key": key,
            "place": place,
            "title": (TITLES | LOSSES).get(key, key),
            "last": found[key][-1][1] if found.get(key) else None,
            "svg": svg,
        }
        for place, (key, svg) in enumerate(zip(keys, svgs, strict=True))
    ]
    drawn = [svg for svg in svgs if svg]
    return {
        "lines": lines,
        "is_large": is_large,
        "interval_of": VALIDATION if VALIDATION in keys else None,
        "whiskers": whiskers(low, high),
        "has_points": bool(drawn),
        "least": drawn[0].least if drawn else None,
        "largest": drawn[0].largest if drawn else None,
    }


def _interval_points(
    found: Mapping[str, Sequence[tuple[int, float]]],
) -> tuple[Sequence[tuple[int, float]], Sequence[tuple[int, float]]]:
    """The two ends of the interval, at the steps that have both."""
    low, high = (dict(found.get(key, ())) for key in INTERVAL)
    steps = [s for s in low if s in high and math.isfinite(low[s]) and math.isfinite(high[s])]
    return [(step, low[step]) for step in steps], [(step, high[step]) for step in steps]


def _buttons(run: RunJson) -> tuple[str, ...]:
    state = "paused" if run["phase"] == "paused" else run["status"]
    approve = ("approve",) if run["status"] == "pending" and run["phase"] == "approval" else ()
    return (*approve, *BUTTONS.get(state, ()))


async def data(request: Request) -> Response:
    """The same as JSON, without the curves, which have an address of their own."""
    run, config = await find_run(request)
    core, now = services(request), services(request).clock.now()
    figures = await figures_of(core.readmodel.runs, run, now=now)
    split = await _time_split(request, run)
    left = await times_left(core.readmodel.runs, [run], now)
    content = {
        "run": run,
        "figures": {one.title: one.value for one in figures},
        "intervals": {one.title: one.interval for one in figures if one.interval},
        "eta_s": left.get(run["id"]),
        "time_split_s": {name: seconds for name, seconds, _ in split},
        "provenance": await _provenance(request, run),
        **await _checkpoints(request, run),
        "config": json.loads(config),
    }
    return ApiResponse(to_jsonable_python(content, inf_nan_mode="null"))


async def log(request: Request) -> Response:
    """The newest lines of the log as JSON, of one severity or of all."""
    run, _ = await find_run(request)
    limit = number(request, "limit", default=LOG_LINES, least=1, most=MOST_LOG_LINES)
    lines, older = await services(request).readmodel.runs.logs(
        run["id"], limit=limit, level=_level(request)
    )
    return ApiResponse({"lines": lines, "older": older is not None})


async def points(request: Request) -> Response:
    """The points of curves as JSON: of each key in `keys`, the range `range`, the steps from `first` to
    `last`, at most `points`; and what is marked on them."""
    run, _ = await find_run(request)
    most = number(request, "points", default=DRAWN_POINTS, least=8, most=100_000)
    since = _since(request, run)
    steps = _steps(request)
    keys = [key for key in request.query_params.get("keys", REWARD).split(",") if key][:50]
    runs = services(request).readmodel.runs
    thinned = await runs.thinned_curves(run["id"], keys, most=most, since=since, steps=steps)
    shown = {key: finite_points(thinned.get(key, ())) for key in keys}
    marks = await runs.marks(run["id"], steps=steps, most=MOST_MARKS)
    return ApiResponse(
        {
            "run": run["name"],
            "status": run["status"],
            "has_ended": run["status"] in ENDED,
            "curves": shown,
            "marks": [asdict(mark) for mark in marks],
        }
    )


def _steps(request: Request) -> tuple[int, int]:
    """The first and the last step that a request asks for. Raises InvalidConfig."""
    least, most = ALL_STEPS
    first = number(request, "first", default=least, least=least, most=most)
    return first, number(request, "last", default=most, least=first, most=most)


async def csv(request: Request) -> Response:
    """All points of one metric as CSV."""
    run, _ = await find_run(request)
    key = request.query_params.get("key", REWARD)
    found = await services(request).readmodel.runs.curve(run["id"], key)
    text = "".join(["step,value\n", *(f"{step},{value!r}\n" for step, value in found)])
    name = f"{run['name']}-{key.replace('/', '-')}.csv"
    plain = "".join(c if c.isascii() and (c.isalnum() or c in ".-_") else "_" for c in name)
    return Response(
        text,
        media_type="text/csv",
        headers={"Content-Disposition": f'attachment; filename="{plain[:150]}"'},
    )


def _since(request: Request, run: RunJson) -> datetime | None:
    """When the range of a request begins: so long before now, or before the end of a run that has
    ended. Raises InvalidConfig."""
    name = request.query_params.get("range") or "all"
    if name in OTHER_RANGES:
        return None
    if name not in RANGES:
        message = f"must be one of {', '.join((*RANGES, *OTHER_RANGES))}, got {name[:20]!r}"
        raise InvalidConfig(f"range {message}", issues=(Issue("range", message),))
    end = run["completed_at"] or services(request).clock.now()
    return end - timedelta(seconds=RANGES[name])


def _range(request: Request) -> str:
    """The range that the page names as the chosen one."""
    asked = request.query_params
    is_custom = asked.get("first") or asked.get("last")
    return asked.get("range") or ("custom" if is_custom else "all")


async def write_notes(request: Request) -> Response:
    """Replace the tags and the note of the run, and go back to its page."""
    fields = await read_session_form(request)
    run = await services(request).notes.replace(
        request.path_params["ref"],
        tags=fields.get("tags", "").replace(",", " ").split(),
        note=fields.get("note", ""),
    )
    return RedirectResponse(f"/runs/{run}", status_code=303)


async def command(request: Request) -> Response:
    """Press a button: stop, pause, resume or approve the run, and go back to its page."""
    await read_session_form(request)
    core, ref = services(request), request.path_params["ref"]
    verb = request.url.path.rpartition("/")[2]
    if verb == "approve":
        _, cursor = await core.approvals.approve(ref)
    else:
        cause = cause_of(request, f"control/{verb}/{ref}")
        _, cursor = await core.control.run(verb, ref, cause=cause)
    await core.readmodel.caught_up(cursor)
    return RedirectResponse(f"/runs/{ref}", status_code=303)


ROUTES = [
    PageRoute("/runs/{ref}", show, scope="read"),
    PageRoute("/runs/{ref}/run.json", data, scope="read"),
    PageRoute("/runs/{ref}/log.json", log, scope="read"),
    PageRoute("/runs/{ref}/curves.json", points, scope="read"),
    PageRoute("/runs/{ref}/curve.csv", csv, scope="read"),
    PageRoute("/runs/{ref}/notes", write_notes, scope="control", methods=["POST"]),
    *(
        PageRoute(f"/runs/{{ref}}/{verb}", command, scope="control", methods=["POST"])
        for verb in ("stop", "pause", "resume", "approve")
    ),
]
