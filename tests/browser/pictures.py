"""Takes the README's pictures of the dashboard, of the runs that `make smollm` and `make smollm-distill`
made: `python -m tests.browser.pictures DIR`.

DIR is the directory of these benchmarks. The pictures show their runs as they are. No benchmark may be
running on it: its platform is started, and stopped again.
"""

import statistics
import sys
from pathlib import Path
from typing import Any

from tests.kit.chromium import ROOT, WITHIN_MS, chromium, open_link
from tests.kit.platform import Platform, platform

FOLDER = ROOT / "docs" / "screenshots"
PICTURES = {
    "runs": "/",
    "run": "/runs/{trained}",
    "samples": "/runs/{trained}/samples?step={step}&slot={slot}",
    "compare": "/compare?runs={trained},{student}",
}
"""Name of a file in FOLDER -> the page that it shows, for the newest finished runs of seed 0. The slot
is that of the group whose rewards differ most."""
STEP = 8
NAMES = {"trained": "smollm-0-", "student": "student-0-"}


def addresses(up: Platform) -> dict[str, str]:
    """The address of each picture. Raises SystemExit when a run is missing."""
    runs: list[dict[str, Any]] = up.get("/runs", status="finished", limit=100)["runs"]
    names = {}
    for role, begin in NAMES.items():
        found = [run["name"] for run in runs if run["name"].startswith(begin)]
        if not found:
            raise SystemExit(f"no finished run is named {begin}*: make smollm smollm-distill")
        names[role] = found[0]
    samples = up.get(f"/runs/{names['trained']}/samples", step=STEP, limit=100)["samples"]
    rewards: dict[int, list[float]] = {}
    for sample in samples:
        rewards.setdefault(sample["slot"], []).append(sample["reward"])
    slot = max(rewards, key=lambda slot: statistics.pstdev(rewards[slot]))
    return {
        name: address.format(**names, step=STEP, slot=slot) for name, address in PICTURES.items()
    }


def take_pictures(up: Platform, folder: Path) -> None:
    """Write every picture into `folder`."""
    pages = addresses(up)
    link = up.post("/login-links", {}).json()["url"]
    folder.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme="light")
        page.set_default_timeout(WITHIN_MS)
        open_link(page, link)
        for name, address in pages.items():
            answer = page.goto(f"{up.url}{address}", wait_until="load")
            if answer is None or answer.status != 200:
                raise SystemExit(f"{address} answers {answer and answer.status}")
            page.wait_for_timeout(1500)  # curves are drawn after the page is loaded
            page.screenshot(path=folder / f"{name}.png")


def main() -> int:
    """Take the pictures of the runs in the given directory, into the given or the README's folder."""
    directory, *others = map(Path, sys.argv[1:])
    with platform(directory.resolve() / "home") as up:
        take_pictures(up, others[0] if others else FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
