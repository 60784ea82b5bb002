"""The errors of engines, as the gateway answers them."""

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, TypeVar

from infra.model_api.wire.errors import GatewayError
from schemas.errors import CorruptData, FailureCategory, Refused, TransientError, UserCodeError

T = TypeVar("T")

STATUS = {
    FailureCategory.PROMPT_TOO_LONG: (400, "context_length_exceeded"),
    FailureCategory.VALIDATION: (400, "invalid_request"),
    FailureCategory.BUDGET: (400, "budget_exceeded"),
    FailureCategory.PROVIDER: (400, "provider_refused"),
}


async def as_gateway_errors(work: Awaitable[T]) -> T:
    """Await the work of an engine. Raises its errors as GatewayError."""
    try:
        return await work
    except UserCodeError as error:
        status, code = STATUS.get(error.category, (500, "internal_error"))
        raise GatewayError(status, code, error.message, category=error.category) from error
    except TransientError as error:
        raise GatewayError(503, "engine_gone", str(error)) from error
    except (Refused, CorruptData) as error:
        category = FailureCategory.INTERNAL
        raise GatewayError(400, "engine_refused", str(error), category=category) from error


async def gather_all(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all of these. When one fails, the others are cancelled, and its error is raised."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
