"""Pushes, and the triggers that they match, as tests need them."""

from typing import Any

from schemas.specs import Push, PushOrigin, TriggerMatch

BEFORE, AFTER = "b" * 40, "a" * 40


def push(number: int = 1, **changes: Any) -> Push:
    """A push to the branch main of the workspace `w1`."""
    fields = {
        "workspace": "w1",
        "workspace_name": "math",
        "url": "/repositories/math",
        "number": number,
        "ref": "refs/heads/main",
        "before": BEFORE,
        "after": AFTER,
    }
    return Push.model_validate({**fields, **changes})


def match(trigger: int = 1, **changes: Any) -> TriggerMatch:
    fields = {"trigger": trigger, "config": "configs/training/grpo.toml", "run_name": "grpo-aaa"}
    return TriggerMatch.model_validate({**fields, **changes})


def origin(
    number: int = 1, trigger: int = 1, *, ref: str = "refs/heads/main", **changes: Any
) -> PushOrigin:
    """The origin of the run of a push and a trigger. `changes` are those of the match."""
    return PushOrigin(
        push=push(number, ref=ref),
        match=match(trigger, **changes),
        context="headrace/math/grpo",
    )
