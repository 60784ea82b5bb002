"""A person signs the unmodified command line in without typing an API key: it shows a code, which the
person approves on a page of the dashboard."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.kit.signed_in import form_key_in
from tests.osmosis.client import LONGEST_S, Osmosis
from tests.osmosis.team import Team, made

pytestmark = [
    pytest.mark.osmosis,
    pytest.mark.processes,
    pytest.mark.postgres,
    pytest.mark.slow,
]

CODE = re.compile(r"/device\?code=([A-Z0-9-]+)")
EMAIL = "ada@example.org"


@pytest.fixture(scope="module")
def browser(team: Team) -> Iterator[httpx.Client]:
    """The browser of ada, who followed the link of an invitation, and is a member now."""
    invited = team.platform.post("/organisations/acme/invitations", {"role": "member"})
    link = made(invited)["url"]
    address = team.platform.url
    with httpx.Client(base_url=address, headers={"Origin": address}, timeout=30) as browser:
        code = httpx.URL(link).params["code"]
        fields = {"code": code, "name": "ada", "email": EMAIL}
        joined = browser.post("/join", data=fields)
        assert joined.status_code == 200, joined.text
        yield browser


@pytest.fixture
def ada(team: Team, tmp_path: Path) -> Osmosis:
    """The command line of ada, who has not signed in."""
    more = {"BROWSER": "true", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    return Osmosis(team.owner.program, team.platform.url, tmp_path, team.directory, more=more)


@contextmanager
def signing_in(osmosis: Osmosis) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`osmosis auth login` while it waits, and the code that it shows."""
    process = subprocess.Popen(
        [osmosis.program, "auth", "login"],
        cwd=osmosis.directory,
        env=osmosis.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = ""
        while (found := CODE.search(said)) is None:
            line = process.stdout.readline()
            assert line, said
            said += line
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def decide(browser: httpx.Client, code: str, decision: str) -> None:
    """Approve or deny a login on its page."""
    page = browser.get("/device", params={"code": code})
    fields = {"form_key": form_key_in(page.text), "code": code, "decision": decision}
    assert browser.post("/device", data=fields).status_code == 200


def test_an_approved_code_signs_the_person_in(
    team: Team, browser: httpx.Client, ada: Osmosis
) -> None:
    with signing_in(ada) as (process, code):
        decide(browser, code, "approve")
        assert process.wait(LONGEST_S) == 0
    shown = ada.run("auth", "whoami")["data"]
    assert (shown["name"], shown["email"]) == ("ada", EMAIL)
    assert shown["workspace"]["id"] == team.workspace
    assert shown["workspace"]["role"] == "member"
    ada.run("train", "list")
    ada.run("auth", "logout", "--yes")
    assert ada.refused("train", "list").code == "AUTH_REQUIRED"


def test_a_denied_code_signs_nobody_in(browser: httpx.Client, ada: Osmosis) -> None:
    with signing_in(ada) as (process, code):
        decide(browser, code, "deny")
        assert process.wait(LONGEST_S) != 0
    assert ada.refused("train", "list").code == "AUTH_REQUIRED"
