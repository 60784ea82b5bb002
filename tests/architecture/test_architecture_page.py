"""docs/architecture.md is true file by file: hops, folders, layers and consumers."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from consumers.registry import REGISTRY, load
from producers.core.history.trace import FILES
from schemas.events import ALL_EVENTS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
ROOTS = ("schemas", "trainer", "infra", "consumers", "producers", "headrace")
HOPS = re.findall(r"^\| (\d) \| `([^`]+)` \| .+ \| (\w+) \|$", PAGE, re.M)
EVENTS = {event.__name__ for event in ALL_EVENTS}


@cache
def makes(path: str) -> set[str]:
    """The names that a file calls: an event that it emits is among them."""
    calls = (n for n in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(n, ast.Call))
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def folders() -> set[str]:
    """The folders of the product that hold files of it."""
    files = (
        p for root in ROOTS for kind in ("py", "sql", "c") for p in (ROOT / root).rglob(f"*.{kind}")
    )
    return {f"{path.parent.relative_to(ROOT)}/" for path in files}


def first_cells(heading: str) -> list[str]:
    """The paths in the first cells of the tables below a heading, in their order."""
    part = re.split(rf"^#+ {heading}$", PAGE, flags=re.M)[1].split("\n## ")[0].split("\n### ")[0]
    rows = re.findall(r"^\| (`.+?) \|", part, re.M)
    return [path for row in rows for path in re.findall(r"`([^`]+)`", row)]


def test_there_are_eight_hops() -> None:
    assert [int(number) for number, _, _ in HOPS] == list(range(1, 9))


@pytest.mark.parametrize(("number", "path", "event"), HOPS)
def test_the_file_of_a_hop_emits_its_event_or_a_breakpoint_there_never_stops(
    number: str, path: str, event: str
) -> None:
    assert event in EVENTS
    assert event in makes(path)
    assert FILES[int(number) - 1][0].split(" ")[0] == path, "`headrace train trace` says another"


def test_twin_the_file_that_only_hosts_the_rules_is_not_a_hop() -> None:
    """Hops 3 and 6 once named it."""
    assert not {"GroupsRequested", "BatchAssembled"} & makes("consumers/run/consumer.py")


def test_the_page_names_every_folder_or_a_newcomer_meets_one_unprepared() -> None:
    named = set(re.findall(r"`([\w/]+/)`", PAGE))
    assert folders() - named == set()


@pytest.mark.parametrize("root", ["infra", "trainer", "producers"])
def test_the_rows_of_a_root_are_its_layers_in_their_order(root: str) -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [contract] = [c for c in config["contracts"] if c.get("containers") == [root]]
    height = {
        name: level
        for level, layer in enumerate(contract["layers"])
        for name in layer.replace(" ", "").split("|")
    }
    rows = [path.split("/")[1].removesuffix(".py") for path in first_cells(root)]
    assert set(rows) == set(height)
    assert [height[row] for row in rows] == sorted(height[row] for row in rows)


@pytest.mark.parametrize("name", REGISTRY)
def test_the_row_of_a_consumer_names_events_that_it_reads_and_emits(name: str) -> None:
    path = REGISTRY[name].replace(".", "/") + ".py"
    found = re.search(rf"^\| `{re.escape(path)}` \| (.+) -> (.+) \| .+ \|$", PAGE, re.M)
    assert found is not None
    consumer = load(name)
    reads, emits = (set(re.findall(r"\b[A-Z]\w+", side)) for side in found.groups())
    assert reads <= {event.__name__ for event in consumer.reads}
    assert emits <= {event.__name__ for event in consumer.emits}
