"""Regrades of runs: request one, list those of a run, show one."""

from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from infra.ports.actor import Actor
from producers.core.history.regrade_views import regrade_json
from producers.core.history.regrades import RegradeWish
from producers.http.auth import actor_of
from producers.http.requests import JsonBody, body_of, cause_of
from producers.http.responses import ApiResponse
from producers.http.routes.runs import services
from producers.http.routing import ScopedRoute
from schemas.config import RubricWeight
from schemas.errors import InvalidConfig, Issue

FIELDS = (*("grader", "tree", "rubrics", "weights", "steps", "share", "threshold", "gradients"),)
RUBRICS = TypeAdapter(tuple[RubricWeight, ...])
MOST_RUBRICS, MOST_WEIGHTS = 16, 256
LARGEST_WEIGHT = 1e6


async def create(request: Request) -> Response:
    ref = request.path_params["ref"]
    wish = wish_from(await body_of(request, FIELDS), actor_of(request))
    view = await services(request).regrades.request(
        ref, wish, cause=cause_of(request, f"regrade/{ref}")
    )
    return ApiResponse({"regrade": regrade_json(view)}, status_code=202)


def wish_from(body: JsonBody, actor: Actor) -> RegradeWish:
    """The wish in a JSON body of an actor. Raises InvalidConfig when a field is not valid."""
    return RegradeWish(
        grader=body.optional("grader"),
        tree=body.optional("tree"),
        rubrics=_rubrics(body),
        weights=_weights(body),
        steps=_steps(body),
        share=body.number("share", default=1.0, least=0.0, most=1.0),
        threshold=body.number("threshold", default=1.0, least=-1e6, most=1e6),
        gradients=body.flag("gradients"),
        submitter=actor.person,
        requester=actor.owner,
    )


def _weights(body: JsonBody) -> dict[str, float]:
    given = body.values.get("weights") or {}
    if not isinstance(given, dict) or len(given) > MOST_WEIGHTS:
        raise _invalid("weights", "must be an object with a number for each name of a part")
    weights = JsonBody(given)
    try:
        return {
            name: float(weights.number(name, default=0, least=-LARGEST_WEIGHT, most=LARGEST_WEIGHT))
            for name in given
        }
    except InvalidConfig as error:
        raise _invalid("weights", f"has a weight that cannot be used: {error.message}") from error


def _steps(body: JsonBody) -> tuple[int, int] | None:
    given = body.values.get("steps")
    if given is None:
        return None
    if not isinstance(given, list) or [type(one) for one in given] != [int, int]:
        raise _invalid(
            "steps", f"must be the first and the last step, like [1, 9], got {given!r:.40}"
        )
    return given[0], given[1]


def _rubrics(body: JsonBody) -> tuple[RubricWeight, ...]:
    given = body.values.get("rubrics") or []
    if not isinstance(given, list) or len(given) > MOST_RUBRICS:
        raise _invalid("rubrics", f"must be a list of at most {MOST_RUBRICS} tables")
    try:
        return RUBRICS.validate_python([_table(one) for one in given])
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][1:]))
        raise _invalid(
            f"rubrics[{first['loc'][0]}].{place}".rstrip("."), str(first["msg"])
        ) from error


def _table(given: object) -> object:
    """A table as TOML has it, where a pair is a list."""
    if not isinstance(given, dict):
        return given
    return {name: tuple(one) if isinstance(one, list) else one for name, one in given.items()}


def _invalid(key: str, message: str) -> InvalidConfig:
    return InvalidConfig(f"{key} {message}", issues=(Issue(key, message),))


async def index(request: Request) -> Response:
    found = await services(request).regrades.list_regrades(request.path_params["ref"])
    return ApiResponse({"regrades": [regrade_json(view) for view in found]})


async def show(request: Request) -> Response:
    view = await services(request).regrades.find_regrade(request.path_params["id"])
    return ApiResponse({"regrade": regrade_json(view)})


ROUTES = [
    ScopedRoute("/runs/{ref}/regrades", create, scope="submit", methods=["POST"]),
    ScopedRoute("/runs/{ref}/regrades", index, scope="read"),
    ScopedRoute("/regrades/{id}", show, scope="read"),
]
