"""The three lines by which docs/osmosis.md connects the client, run as they are printed, but for the
address of the server and that of the repository."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.platform import ROOT, platform
from tests.osmosis import workspace
from tests.osmosis.client import Osmosis

pytestmark = [
    pytest.mark.osmosis,
    pytest.mark.processes,
    pytest.mark.postgres,
    pytest.mark.slow,
]

PAGE = ROOT / "docs" / "osmosis.md"
THEN = """
osmosis --json auth whoami
osmosis --json dataset upload data/numbers.jsonl --yes
osmosis --json train list
"""


def test_three_lines_connect_a_newcomer(program: Path, tmp_path: Path) -> None:
    """The API key that they make is that of a member: it uploads, and may not administrate."""
    lines = PAGE.read_text().split("```bash\n")[1].split("```")[0]
    assert len(lines.splitlines()) == 3, lines
    directory, bare = tmp_path / "worktree", tmp_path / "acme" / "sums.git"
    directory.mkdir()
    with platform(tmp_path / "home") as started:
        client = Osmosis(program, started.url, tmp_path / "person", directory)
        client.home.mkdir()
        workspace.make_worktree(directory, bare, repository="acme/sums", osmosis=client)
        lines = lines.replace("https://hr.example", started.url)
        # An address on GitHub names its repository; a folder does not.
        lines = lines.replace("https://github.com/acme/sums", f"{bare} --repository acme/sums")
        places = [str(program.parent), str(Path(sys.executable).parent)]
        env = {**started.environment, **client.environment}
        del env["OSMOSIS_PLATFORM_URL"]
        env["PATH"] = ":".join([*places, env["PATH"]])
        done = subprocess.run(
            ["bash", "-euc", f"{lines}{THEN}"],
            cwd=directory,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    said = json.JSONDecoder()
    text, found = done.stdout[done.stdout.index("{") :], []
    while text.strip():
        one, end = said.raw_decode(text)
        found.append(one)
        text = text[end:].lstrip()
    who, uploaded, listed = found
    assert who["data"]["workspace"]["name"] == "sums"
    assert who["data"]["workspace"]["role"] == "member"
    assert uploaded["resource"]["status"] == "uploaded"
    assert listed["items"] == []
