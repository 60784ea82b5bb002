"""The five types of a consumer tie its functions together: mypy rejects one that does not fit."""

from pathlib import Path

from mypy import api

ROOT = Path(__file__).resolve().parents[5]

MODULE = """
from consumers.checkpoint import CheckpointPorts
from consumers.grade import GradePorts
from infra.spine.runtime.consumer import NOTHING, Consumer, Decision, Meta
from schemas.effects import Failed, GradeGroup, GroupScored, SaveCheckpoint
from schemas.events import GroupGenerated, GroupGraded, RunWarned
from schemas.ids import ConsumerName, StreamName

GradeMessage = GroupGenerated | GroupScored | Failed

def evolve(state: int, event: GroupGraded) -> int:
    return state + 1

def handle(state: int, message: GradeMessage, meta: Meta) -> Decision:
    return NOTHING

def routes(message: GradeMessage) -> tuple[StreamName, ...]:
    return ()

async def perform(effect: GradeGroup, ports: GradePorts) -> GroupScored:
    raise NotImplementedError

def evolve_another(state: int, event: RunWarned) -> int:
    return state

def evolve_text(state: str, event: GroupGraded) -> str:
    return state

def handle_less(state: int, message: GroupGenerated, meta: Meta) -> Decision:
    return NOTHING

def handle_without_meta(state: int, message: GradeMessage) -> Decision:
    return NOTHING

async def perform_another(effect: SaveCheckpoint, ports: GradePorts) -> GroupScored:
    raise NotImplementedError

async def perform_an_event(effect: GradeGroup, ports: GradePorts) -> GroupGraded:
    raise NotImplementedError
"""

RIGHT = {
    "reads": "(GroupGenerated,)",
    "emits": "(GroupGraded,)",
    "effects": "(GradeGroup,)",
    "initial": "0",
    "evolve": "evolve",
    "handle": "handle",
    "routes": "routes",
    "perform": "perform",
    "ports": "GradePorts",
}

WRONG = [
    ("reads", "(RunWarned,)"),
    ("emits", "(RunWarned,)"),
    ("effects", "(SaveCheckpoint,)"),
    ("initial", "'none'"),
    ("evolve", "evolve_another"),
    ("evolve", "evolve_text"),
    ("handle", "handle_less"),
    ("handle", "handle_without_meta"),
    ("perform", "perform_another"),
    ("perform", "perform_an_event"),
    ("ports", "CheckpointPorts"),
]
"""A part of a consumer, and what does not fit in its place."""


def declared(**parts: str) -> str:
    """A consumer on one line, with these parts in place of the right ones."""
    arguments = ", ".join(f"{name}={value}" for name, value in {**RIGHT, **parts}.items())
    kind = "Consumer[int, GroupGraded, GradeMessage, GradeGroup, GradePorts]"
    return f"{kind}(name=ConsumerName('x'), category='grade', {arguments})"


def test_mypy_rejects_a_consumer_whose_parts_do_not_fit(tmp_path: Path) -> None:
    lines = [*MODULE.splitlines(), declared(), *(declared(**{part: bad}) for part, bad in WRONG)]
    module = tmp_path / "declared.py"
    module.write_text("\n".join(lines) + "\n")
    config = f"--config-file={ROOT / 'pyproject.toml'}"
    cache = str(ROOT / ".mypy_cache")  # of `make lint`, so that only this module is checked
    output, _, _ = api.run([config, "--cache-dir", cache, "--no-pretty", str(module)])
    rejected = {
        int(line.split(":")[1]): line for line in output.splitlines() if ": error: " in line
    }
    first = len(MODULE.splitlines()) + 2
    assert set(rejected) == set(range(first, first + len(WRONG))), output
    for (part, _), line in zip(WRONG, rejected.values(), strict=True):
        assert f'"{part}"' in line or "tuple" in line or "Tuple" in line, line
