"""Failpoints that tests arm in a platform, and which of them have killed a process."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.kit.platform import ROWS, Platform, eventually, make_workspace, platform

Points = Mapping[str, int]
"""Failpoint -> at which hit a process kills itself there."""


def once(*names: str) -> Points:
    """These points, each at its first hit."""
    return dict.fromkeys(names, 1)


def arm(points: Points) -> dict[str, str]:
    """The setting that arms these points."""
    return {"HEADRACE_FAILPOINT": ",".join(f"{name}:{hit}" for name, hit in points.items())}


def fired_points(home: Path) -> set[str]:
    """The points that have killed a process of the platform on this home."""
    return {marker.name for marker in home.glob("failpoints/*")}


def check_fired(home: Path, points: Points) -> None:
    """Assert that each of the armed points has killed a process."""
    fired = fired_points(home)
    assert fired == set(points), f"these never fired: {set(points) - fired}"


@dataclass(frozen=True)
class Stage:
    """A folder for a platform, and the points at which its processes kill themselves."""

    root: Path
    points: Points

    @property
    def home(self) -> Path:
        return self.root / "home"

    @contextmanager
    def platform(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        files: Mapping[str, str] | None = None,
        rows: str = ROWS,
    ) -> Iterator[Platform]:
        """A platform with the workspace `w`, which holds these files, and the dataset `numbers`."""
        workspace = make_workspace(self.root / "workspace", files)
        environment = {**(settings or {}), **arm(self.points)}
        with platform(self.home, environment=environment) as started:
            made = started.post("/workspaces", {"url": str(workspace), "name": "w"})
            assert made.status_code == 201, made.text
            started.upload("numbers", rows)
            yield started
            # The last points may be reached only after the answer that a scenario waits for.
            eventually(
                lambda: fired_points(self.home) >= set(self.points) or None,
                within_s=60,
                what=f"all of {', '.join(self.points)} kill a process",
            )
