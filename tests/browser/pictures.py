"""Takes the README's pictures of the dashboard from a real demo: `python -m tests.browser.pictures DIR`.

DIR is the directory of a demo (`headrace demo --keep DIR`). The pictures show its runs as they are. If
its platform is not running, it is started and stopped again.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.operations.local.home import read_state
from producers.cli.client import Client, ServerAddress
from producers.cli.demo.platform import DemoPlatform
from producers.cli.demo.story import GRPO, SFT
from tests.kit.chromium import ROOT, WITHIN_MS, chromium, open_link

FOLDER = ROOT / "docs" / "screenshots"
PICTURES = {
    "runs": "/",
    "run": f"/runs/{GRPO}",
    "samples": f"/runs/{GRPO}/samples?step=1",
    "compare": f"/compare?runs={SFT},{GRPO}",
}
"""Name of a file in FOLDER -> the page that it shows."""


@contextmanager
def demo_server(directory: Path) -> Iterator[Client]:
    """A client of a demo's platform, which runs inside of the block. Raises Failure."""
    platform = DemoPlatform(directory.resolve())
    state = read_state(platform.home)
    if state is not None:
        with Client(ServerAddress(state.url, (platform.home / "token").read_text().strip())) as it:
            yield it
        return
    try:
        with platform.start() as client:
            yield client
    finally:
        platform.stop()


def take_pictures(client: Client, folder: Path) -> None:
    """Write every picture into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme="light")
        page.set_default_timeout(WITHIN_MS)
        open_link(page, client.post("/login-links", {})["url"])
        for name, address in PICTURES.items():
            answer = page.goto(f"{client.address.url}{address}", wait_until="load")
            if answer is None or answer.status != 200:
                raise SystemExit(f"{address} answers {answer and answer.status}; is this a demo?")
            page.wait_for_timeout(1500)  # curves are drawn after the page is loaded
            page.screenshot(path=folder / f"{name}.png")


def main() -> int:
    """Take the pictures of the demo in the given directory, into the given or the README's folder."""
    directory, *others = map(Path, sys.argv[1:])
    with demo_server(directory) as client:
        take_pictures(client, others[0] if others else FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
