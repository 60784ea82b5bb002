"""The samples of a run: the groups of a step, and the answers of one group side by side."""

from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response

from infra.readmodel.runs import GroupRow, PageRange
from producers.dashboard.rendering import html
from producers.dashboard.routing import PageRoute
from producers.http.responses import number
from producers.http.routes.runs import find_run_with_history, services
from producers.http.routes.samples import GRADES, MAX_STEP, read_judgements, read_rows
from schemas.datasets import DatasetRow
from schemas.errors import InvalidConfig, Issue
from schemas.ids import GroupId, sample_id
from schemas.sampling import ArtifactRef, Grade, Judgement, SampleBatch, SampleRecord

EVERYTHING = PageRange(limit=MAX_STEP)
ORDERS = ("index", "reward", "length", "failure")


async def index(request: Request) -> Response:
    run, _ = await find_run_with_history(request)
    core = services(request)
    last = max(1, run["current_step"] or 1)
    step = number(request, "step", default=last, least=0, most=MAX_STEP)
    slot = number(request, "slot", default=-1, least=0, most=MAX_STEP)
    order = _order(request)
    groups, _ = await core.readmodel.runs.groups(run["id"], "train", EVERYTHING, step=step)
    chosen = next((group for group in groups if group.slot == slot), groups[0] if groups else None)
    dataset = await core.readmodel.runs.dataset_ref(run["id"])
    rows = await read_rows(request, dataset, [chosen]) if chosen else {}
    return html(
        request,
        "samples.html",
        {
            "run": run,
            "step": step,
            "last": last,
            "groups": [_summary(group) for group in groups],
            "chosen": chosen,
            "row": rows.get(chosen.dataset_row, DatasetRow(prompt=())) if chosen else None,
            "samples": await _samples(request, chosen, order) if chosen else (),
            "order": order,
            "orders": ORDERS,
        },
    )


def _order(request: Request) -> str:
    order = request.query_params.get("order") or ORDERS[0]
    if order not in ORDERS:
        message = f"must be one of {', '.join(ORDERS)}, got {order[:20]!r}"
        raise InvalidConfig(f"order {message}", issues=(Issue("order", message),))
    return order


def _summary(group: GroupRow) -> Mapping[str, object]:
    """A group in the list: its number, its row, and the mean and spread of its rewards."""
    grades = GRADES.validate_json(group.grades)
    rewards = [grade.reward for grade in grades if grade.reward is not None]
    return {
        "slot": group.slot,
        "dataset_row": group.dataset_row,
        "replacement": group.replacement,
        "mean": sum(rewards) / len(rewards) if rewards else None,
        "least": min(rewards, default=None),
        "largest": max(rewards, default=None),
        "failed": len(grades) - len(rewards),
    }


async def _samples(request: Request, group: GroupRow, order: str) -> Sequence[Mapping[str, object]]:
    ref = ArtifactRef.model_validate_json(group.artifact)
    batch = SampleBatch.model_validate_json(await services(request).artifacts.get(ref))
    judged = await read_judgements(request, group)
    grades = {grade.index: grade for grade in GRADES.validate_json(group.grades)}
    found = [_sample(group, record, grades.get(record.index), judged) for record in batch.samples]
    rewards = [one["reward"] for one in found if isinstance(one["reward"], float)]
    mean = sum(rewards) / len(rewards) if rewards else None
    for one in found:
        reward = one["reward"]
        one["advantage"] = reward - mean if isinstance(reward, float) and mean is not None else None
    keys = {
        "index": lambda one: one["index"],
        "reward": lambda one: -1e300 if one["reward"] is None else -one["reward"],
        "length": lambda one: -one["completion_tokens"],
        "failure": lambda one: one["failure"] is None,
    }
    return sorted(found, key=keys[order])


def _sample(
    group: GroupRow, record: SampleRecord, grade: Grade | None, judged: Sequence[Judgement]
) -> dict[str, object]:
    return {
        "id": sample_id(GroupId(group.group), record.index),
        "index": record.index,
        "messages": record.messages,
        "text": record.text,
        "reward": grade.reward if grade else None,
        "parts": grade.parts if grade else {},
        "failure": record.failure or (grade.failure if grade else None),
        "judgements": [one for one in judged if one.index == record.index],
        "output": record.output,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "truncated": record.truncated,
        "num_turns": record.num_turns,
    }


ROUTES = [PageRoute("/runs/{ref}/samples", index, scope="read")]
