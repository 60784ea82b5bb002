"""Names are checked whole: `re.match` with `$` lets a newline at the end pass. Task groups are ours."""

import ast
import re
from pathlib import Path

import pytest

from infra.settings.kafka import KafkaSettings
from producers.core import lookup, run_names, workspaces
from producers.core.datasets import registration
from producers.core.models import model_ref
from producers.http import requests
from tests.kit.source import modules, nodes, relative


def places_of(path: Path, module: str, name: str) -> list[str]:
    """The places where a name of a module is used: as an attribute of it, or imported from it."""
    return [
        f"{relative(path)}:{node.lineno}"
        for node in nodes(path)
        if (isinstance(node, ast.Attribute) and node.attr == name)
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == module
            and name in [alias.name for alias in node.names]
        )
    ]


def test_no_task_group_of_asyncio_is_used() -> None:
    """It leaves a cancellation behind on Python 3.11 and 3.12, which hides outcomes from the runtime."""
    found = [place for path in modules() for place in places_of(path, "asyncio", "TaskGroup")]
    assert [place.partition(":")[0] for place in found] == ["infra/task_cancellation.py"], (
        "use infra.task_cancellation.TaskGroup"
    )


def test_nothing_is_checked_by_match() -> None:
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in modules()
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "match"
    ]
    assert not found, "use fullmatch (or search): match ignores a newline before the end"


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (registration.NAME, "a-dataset"),
        (run_names.NAME, "a-run"),
        (workspaces.NAME, "a-workspace"),
        (lookup.CHECKPOINT, "run@3"),
        (model_ref.HUB, "org/name"),
        (requests.KEY, "a-key"),
    ],
)
def test_a_newline_at_the_end_is_no_part_of_a_name(pattern: re.Pattern[str], name: str) -> None:
    assert pattern.fullmatch(name)
    assert pattern.fullmatch(f"{name}\n") is None
    assert pattern.match(f"{name}\n"), "the twin: this is what `match` lets pass"


def test_a_topic_prefix_that_ends_in_a_newline_is_refused() -> None:
    with pytest.raises(ValueError, match="HEADRACE_KAFKA_PREFIX"):
        KafkaSettings.load({"HEADRACE_KAFKA": "h:9092", "HEADRACE_KAFKA_PREFIX": "x\n"})
