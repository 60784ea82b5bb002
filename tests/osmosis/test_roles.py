"""Owners, members and viewers of two organisations with the same names beside each other walk through
their commands. The people of `north` sign in with codes, those of `south` with API keys.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from tests.kit.platform import TINY, Platform, platform
from tests.osmosis import workspace
from tests.osmosis.client import LONGEST_S, Osmosis
from tests.osmosis.team import SCOPES, Team, join, made
from tests.osmosis.test_device_login import decide, signing_in
from tests.osmosis.test_walk import ENDED, EVALUATION, TRAINING, wait

pytestmark = [
    pytest.mark.osmosis,
    pytest.mark.processes,
    pytest.mark.postgres,
    pytest.mark.torch,
    pytest.mark.slow,
]

People = Mapping[str, Osmosis]
"""The command lines of an organisation, by role."""

ROWS = {"north": workspace.ROWS, "south": workspace.ROWS[::-1]}

CHANGES = {
    "upload": ("dataset", "upload", "data/numbers.jsonl", "--overwrite", "--yes"),
    "submit": ("train", "submit", TRAINING, "--yes"),
    "stop": ("train", "stop", "RUN", "--yes"),
    "evaluate": ("eval", "submit", EVALUATION, "--yes"),
    "stop-eval": ("eval", "stop", "EVAL", "--yes"),
    "retry": ("eval", "retry", "EVAL", "--yes"),
    "secret": ("secret", "set", "SUMS_KEY", "--scope", "workspace", "--env", "PATH"),
}
"""What changes something, and what a viewer may therefore not do."""


@pytest.fixture(scope="module")
def both(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Team]]:
    """Two organisations, each with a workspace `sums` of the repository acme/sums."""
    root = tmp_path_factory.mktemp("roles")
    with platform(root / "home") as started:
        teams = {name: join(started, program, root, organisation=name) for name in ROWS}
        for name, team in teams.items():
            data = team.directory / "data" / "numbers.jsonl"
            data.write_text(workspace.rows_of(ROWS[name]))
            evaluation = workspace.EVALUATION.replace("MODEL", TINY).replace("n = 2", "n = 1")
            (team.directory / EVALUATION).write_text(evaluation)
            workspace.push(team.directory, "rows and an evaluation")
        yield teams


@pytest.fixture(scope="module")
def people(both: Mapping[str, Team]) -> Mapping[str, People]:
    north, south = both["north"], both["south"]
    signed_in = {role: person_with_code(north, role) for role in SCOPES}
    return {"north": signed_in, "south": south.clients}


def person_with_code(team: Team, role: str) -> Osmosis:
    """A new person of the organisation, who accepted an invitation, and then signed the command line in
    with a code."""
    home = team.directory.parent / f"{role}-with-code"
    home.mkdir()
    more = {"BROWSER": "true", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    person = Osmosis(team.owner.program, team.platform.url, home, team.directory, more=more)
    address = team.platform.url
    with httpx.Client(base_url=address, headers={"Origin": address}, timeout=30) as browser:
        link = made(invite(team.platform, role))["url"]
        fields = {"code": httpx.URL(link).params["code"], "name": role}
        joined = browser.post("/join", data={**fields, "email": f"{role}@example.org"})
        assert joined.status_code == 200, joined.text
        with signing_in(person) as (process, code):
            decide(browser, code, "approve")
            assert process.wait(LONGEST_S) == 0
    return person


def invite(started: Platform, role: str) -> httpx.Response:
    return started.post("/organisations/north/invitations", {"role": role})


def graded(found: Mapping[str, object]) -> bool:
    results = found["results"]
    return isinstance(results, Mapping) and results["graded"] > 0


def test_everybody_has_the_role_of_an_organisation(people: Mapping[str, People]) -> None:
    for clients in people.values():
        for role, osmosis in clients.items():
            shown = osmosis.run("auth", "whoami")["data"]["workspace"]
            assert (shown["name"], shown["role"]) == ("sums", role)


def test_members_work_and_viewers_watch(
    both: Mapping[str, Team], people: Mapping[str, People], tmp_path: Path
) -> None:
    """Owners and members upload, submit, stop, evaluate and repeat. Viewers see that, and are told which
    scope they lack for each change. Both organisations do it at the same time."""
    runs, evaluations = {}, {}
    for name, clients in people.items():
        clients["member"].run("dataset", "upload", "data/numbers.jsonl", "--yes")
        runs[name] = clients["owner"].run("train", "submit", TRAINING, "--yes")["resource"]["name"]
        clients["member"].run("train", "stop", runs[name], "--yes")
        submitted = clients["member"].run("eval", "submit", EVALUATION, "--yes")
        evaluations[name] = submitted["resource"]["name"]
    for name, clients in people.items():
        wait(clients["member"], "eval", evaluations[name], graded)
        clients["owner"].run("eval", "stop", evaluations[name], "--yes")
        viewer = clients["viewer"]
        shown = viewer.run("dataset", "preview", "numbers", "--rows", "1")["data"]["rows"]
        assert shown == ROWS[name][:1], "the rows of its own organisation"
        assert viewer.run("train", "logs", runs[name])["items"]
        for change in CHANGES.values():
            named = {"RUN": runs[name], "EVAL": evaluations[name]}
            refused = viewer.refused(*(named.get(word, word) for word in change))
            assert "needs an API key with the scope" in refused.message, change
            assert refused.error["details"]["status_code"] == 403
    for name, clients in people.items():
        member, evaluation = clients["member"], evaluations[name]
        stopped = wait(member, "eval", evaluation, lambda e: e["eval_run"]["status"] in ENDED)
        repeated = member.run("eval", "retry", evaluation, "--yes")["resource"]
        assert repeated["retryable_samples"] == stopped["results"]["skipped"] > 0
    for name, clients in people.items():
        viewer, evaluation = clients["viewer"], evaluations[name]
        found = wait(viewer, "eval", evaluation, lambda e: e["eval_run"]["status"] == "finished")
        assert found["results"]["graded"] == 8
        saved = tmp_path / name
        done = viewer.run("eval", "download", evaluation, "--type", "all", "-o", str(saved), "-y")
        assert done["resource"]["files_failed"] == []
        other = people["south" if name == "north" else "north"]
        for group, theirs in (("train", runs[name]), ("eval", evaluations[name])):
            assert theirs not in [one["name"] for one in other["owner"].run(group, "list")["items"]]
            assert other["owner"].refused(group, "info", theirs).code == "NOT_FOUND"


def test_secrets_of_one_name_are_those_of_an_organisation(people: Mapping[str, People]) -> None:
    """An owner sets them for the workspace, and everybody there sees the name alone."""
    for name, clients in people.items():
        owner = clients["owner"]
        more = {**owner.more, "VALUE": f"hidden-in-{name}"}
        with_value = Osmosis(
            owner.program, owner.url, owner.home, owner.directory, owner.api_key, more
        )
        with_value.run("secret", "set", "SUMS_KEY", "--scope", "workspace", "--env", "VALUE")
    people["north"]["owner"].run("secret", "delete", "SUMS_KEY", "--scope", "workspace", "--yes")
    left = {
        name: clients["viewer"].run("secret", "list", "--scope", "workspace")["items"]
        for name, clients in people.items()
    }
    assert left["north"] == []
    assert [one["name"] for one in left["south"]] == ["SUMS_KEY"]


def test_people_log_out_for_themselves_alone(people: Mapping[str, People]) -> None:
    """It comes last. The keys of the others stay valid."""
    north = people["north"]
    for role in ("viewer", "member"):
        north[role].run("auth", "logout", "--yes")
        assert north[role].refused("train", "list").code == "AUTH_REQUIRED"
    north["owner"].run("train", "list")
    people["south"]["viewer"].run("train", "list")
