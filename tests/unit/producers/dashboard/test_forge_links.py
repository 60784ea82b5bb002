"""Links to the pages of commits on forges."""

import html
import re
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.spine.postgres.pool import connect
from producers.dashboard.forge_links import commit_address
from tests.kit.application import Application
from tests.kit.hostile_strings import hostile_strings
from tests.kit.markup import structure
from tests.kit.showcase import FIRST, WORKSPACE, fill

SHA = "c" * 40


@pytest.mark.parametrize(
    ("repository", "forge", "page"),
    [
        ("https://github.com/o/r", None, "https://github.com/o/r/commit/"),
        ("https://github.com/o/r.git", "github", "https://github.com/o/r/commit/"),
        ("https://GitHub.com/o/r/", None, "https://github.com/o/r/commit/"),
        ("git@github.com:o/r.git", None, "https://github.com/o/r/commit/"),
        ("ssh://git@ssh.github.com:443/o/r.git", None, "https://github.com/o/r/commit/"),
        ("https://team.ghe.com/o/r", None, "https://team.ghe.com/o/r/commit/"),
        ("https://gitlab.com/a/b/c.git", None, "https://gitlab.com/a/b/c/-/commit/"),
        ("https://codeberg.org/o/r", None, "https://codeberg.org/o/r/commit/"),
        ("https://git.example/o/r", "gitea", "https://git.example/o/r/commit/"),
        ("https://git.example:3000/x/o/r", "gitea", "https://git.example:3000/x/o/r/commit/"),
        ("https://[::1]:3000/o/r", "gitea", "https://[::1]:3000/o/r/commit/"),
        ("https://git.example/o/r", "gitlab", "https://git.example/o/r/-/commit/"),
        ("https://user:hush@github.com/o/r", None, "https://github.com/o/r/commit/"),
        ("https://github.com\\@git.example/o/r", "gitea", "https://git.example/o/r/commit/"),
        ("https://hush@git.example/o/r?t=hush#hush", "gitea", "https://git.example/o/r/commit/"),
    ],
)
def test_a_commit_links_to_its_page_on_each_forge(
    repository: str, forge: str | None, page: str
) -> None:
    assert commit_address(repository, SHA, forge=forge) == page + SHA


@pytest.mark.parametrize(
    ("repository", "forge"),
    [
        ("https://git.example/o/r", None),
        ("https://git.example/o/r", "none"),
        ("https://git.example/o/r", "sourcehut"),
        ("http://github.com/o/r", None),
        ("http://127.0.0.1:3000/o/r", "gitea"),
        ("https://github.com", "github"),
        ("https://github.com/o/../r", "github"),
        ("https://github.com/o/%2e%2e", "github"),
        ("https://github.com/o/r%0a", "github"),
        ("https://github.com/o/<b>", "github"),
        ('https://git.example"x/o/r', "gitea"),
        ("https://g\N{CYRILLIC SMALL LETTER I}thub.com/o/r", "github"),
        ("user:hush@github.com:o/r", "github"),
        ("https://github.com/o/hush@r", "github"),
        ("https://github.com/o/" + "r" * 1000, "github"),
        ("javascript:alert(1)//github.com/o/r", "github"),
        ("/srv/o/r", None),
        ("/srv/o/r", "gitea"),
        ("file:///srv/o/r", "gitea"),
        ("", "gitea"),
    ],
)
def test_a_link_needs_a_known_forge_and_a_plain_https_address(
    repository: str, forge: str | None
) -> None:
    assert commit_address(repository, SHA, forge=forge) is None


@pytest.mark.parametrize(
    "sha",
    [
        None,
        "",
        "main",
        "abc123",
        "0" * 40,
        "c" * 65,
        SHA + "\n",
        SHA[:-1] + "g",
        SHA[:-1] + "\N{FULLWIDTH DIGIT ONE}",
        "../../../login",
    ],
)
def test_a_link_needs_a_hexadecimal_sha(sha: str | None) -> None:
    assert commit_address("https://github.com/o/r", sha) is None


hosts = st.one_of(st.sampled_from(["github.com", "gitlab.com", "git.example:3000"]), st.text())
repositories = st.one_of(
    st.text(),
    st.sampled_from(hostile_strings(300)),
    st.builds(
        "{}{}{}/{}/{}".format,
        st.sampled_from(["https://", "http://", "ssh://", "git@", ""]),
        st.sampled_from(["", "user:hush@", "hush@"]),
        hosts,
        st.text(),
        st.text(),
    ),
)


@given(
    repositories,
    st.one_of(st.text(), st.just(SHA)),
    st.sampled_from([None, "github", "gitea", "gitlab", "none"]),
)
def test_a_link_is_plain_whatever_the_address_is(
    repository: str, sha: str, forge: str | None
) -> None:
    found = commit_address(repository, sha, forge=forge)
    if found is None:
        return
    parts = urlsplit(found)
    assert parts.scheme == "https"
    assert parts.hostname
    assert (parts.username, parts.password, parts.query, parts.fragment) == (None, None, "", "")
    assert found.endswith(f"/{sha}")
    assert set(sha) <= set("0123456789abcdefABCDEF")
    assert re.fullmatch(r"[!-~]+", found)
    assert not set(found) & set("\"'<>\\@ ")
    assert html.escape(found) == found


def _links(text: str) -> list[str]:
    """The addresses of other sites. Each is an anchor that tells them nothing."""
    found = re.findall(r'<a ([^>]*href="https?:[^>]*)>', text)
    assert len(found) == len(re.findall(r'(?:href|src|action)="(?:https?:)?//', text))
    assert all('rel="noopener noreferrer"' in one for one in found)
    return [one.partition('href="')[2].partition('"')[0] for one in found]


@pytest.mark.postgres
async def test_pages_link_to_commits_and_show_text_without_a_forge(
    app: Application, browser: httpx.AsyncClient, database_url: str
) -> None:
    await fill(app, steps=2)
    page = "https://git.example.org/team/sums/commit/"
    for path, shas in ((f"/runs/{FIRST}", "c"), (f"/workspaces/{WORKSPACE}", "cb")):
        text = (await browser.get(path)).text
        assert [*dict.fromkeys(_links(text))] == [page + sha * 40 for sha in shas]
    for url, forge in (
        ("http://git.example.org/team/sums", "gitea"),
        ("/srv/team/sums", "none"),
        ("https://git.example.org/team/sums", None),
        *((url, "gitea") for url in hostile_strings(40, storable=True)),
    ):
        async with connect(database_url) as database:
            update = "update workspaces set url = $1, forge = $2"
            await database.durable.execute(update, url, forge)
        for path, shas in ((f"/runs/{FIRST}", "c"), (f"/workspaces/{WORKSPACE}", "cb")):
            text = (await browser.get(path)).text
            assert _links(text) == []
            length = 40 if path.startswith("/runs") else 12
            assert all(f"<code>{sha * length}</code>" in text for sha in shas)
            structure(text)
