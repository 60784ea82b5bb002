"""docs/architecture.md is true file by file: hops, folders, layers and consumers."""

import ast
import re
import tomllib
from functools import cache

import pytest

from consumers.registry import REGISTRY, load
from producers.core.history.trace import FILES
from schemas.events import ALL_EVENTS
from tests.kit.source import ROOT, ROOTS, nodes

PAGE = (ROOT / "docs" / "architecture.md").read_text()
HOPS = re.findall(r"^\| (\d) \| `([^`]+)` \| .+ \| (\w+) \|$", PAGE, re.M)
EVENTS = {event.__name__ for event in ALL_EVENTS}


@cache
def makes(path: str) -> set[str]:
    """The names that a file calls: an event that it emits is among them."""
    calls = (n for n in nodes(ROOT / path) if isinstance(n, ast.Call))
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


def test_the_file_of_a_hop_emits_its_event_or_a_breakpoint_there_never_stops() -> None:
    for number, path, event in HOPS:
        assert event in EVENTS, number
        assert event in makes(path), number
        traced = FILES[int(number) - 1][0].split(" ")[0]
        assert traced == path, f"hop {number}: `headrace train trace` says another"


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


def test_the_row_of_a_consumer_names_all_events_that_it_reads_and_emits_or_none() -> None:
    for name, module in REGISTRY.items():
        path = module.replace(".", "/") + ".py"
        found = re.search(rf"^\| `{re.escape(path)}` \| (.+) -> (.+) \| .+ \|$", PAGE, re.M)
        assert found is not None, name
        consumer = load(name)
        reads, emits = (set(re.findall(r"\b[A-Z]\w+", side)) for side in found.groups())
        assert reads in ({event.__name__ for event in consumer.reads}, set()), name
        assert emits in ({event.__name__ for event in consumer.emits}, set()), name
