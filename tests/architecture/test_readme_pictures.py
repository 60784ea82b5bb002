"""The README's pictures come from real runs, which a target of the Makefile repeats."""

import re
from pathlib import Path

from tests.browser.pictures import FOLDER, PICTURES

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
README = (ROOT / "README.md").read_text()
DRAWING = "docs/run.svg"
CURVE = "docs/smollm.png"


def test_the_readme_shows_what_its_targets_make() -> None:
    shown = set(re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README))
    taken = {str((FOLDER / f"{name}.png").relative_to(ROOT)) for name in PICTURES}
    assert shown == {DRAWING, CURVE} | taken


def test_there_is_no_other_picture_of_the_dashboard() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(PICTURES)


def test_targets_take_them_from_runs_that_they_make() -> None:
    recipe = re.search(r"^pictures:.*\n((?:\t.*\n)+)", MAKEFILE, re.M)
    assert recipe is not None
    assert "bench.b17_distillation" in recipe[1]
    assert "tests.browser.pictures" in recipe[1]
    assert "`make pictures`" in README
    assert f"make smollm ARGS='--plot {CURVE}'" in MAKEFILE
    assert re.search(r"^smollm:", MAKEFILE, re.M)
