"""The list of failpoints is true: it says of every consumer what the registry says."""

from consumers.registry import REGISTRY, load
from infra import failpoints
from tests.architecture.test_repository import ROOT


def test_the_table_of_performers_is_the_registry() -> None:
    assert list(failpoints.CONSUMERS) == list(REGISTRY)
    for name, effects in failpoints.CONSUMERS.items():
        assert set(load(name).effects) == set(effects), name


def test_named_points_are_passed_somewhere() -> None:
    sources = "".join(
        path.read_text()
        for folder in ("infra", "consumers", "producers")
        for path in (ROOT / folder).rglob("*.py")
    )
    unused = [name for name in failpoints.NAMED if f'hit("{name}")' not in sources]
    assert not unused
