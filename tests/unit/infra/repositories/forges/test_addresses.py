"""Where the API of a repository's forge is, and which forge a host belongs to."""

import pytest

from infra.repositories.forges.address import RepositoryAddress, guess_forge
from schemas.errors import InvalidConfig
from schemas.events import ForgeKind


@pytest.mark.parametrize(
    ("url", "forge", "api", "path"),
    [
        ("https://github.com/o/r", "github", "https://api.github.com", "o/r"),
        ("https://github.com/o/r.git/", "github", "https://api.github.com", "o/r"),
        ("git@github.com:o/r.git", "github", "https://api.github.com", "o/r"),
        ("ssh://git@ssh.github.com:443/o/r.git", "github", "https://api.github.com", "o/r"),
        ("https://corp.example/o/r", "github", "https://corp.example/api/v3", "o/r"),
        ("https://team.ghe.com/o/r", "github", "https://api.team.ghe.com", "o/r"),
        ("http://127.0.0.1:3000/o/r", "gitea", "http://127.0.0.1:3000/api/v1", "o/r"),
        ("http://[::1]:3000/o/r", "gitea", "http://[::1]:3000/api/v1", "o/r"),
        ("ssh://git@Git.Example:2222/o/r", "gitea", "https://git.example/api/v1", "o/r"),
        ("https://h.example/git/o/r", "gitea", "https://h.example/git/api/v1", "git/o/r"),
        ("https://user:pw@h.example/o/r", "gitea", "https://h.example/api/v1", "o/r"),
        ("git@gitlab.com:a/b/c.git", "gitlab", "https://gitlab.com/api/v4", "a/b/c"),
    ],
)
def test_an_address_leads_to_the_api_of_its_forge(
    url: str, forge: ForgeKind, api: str, path: str
) -> None:
    address = RepositoryAddress.parse(url)
    assert (address.api(forge), address.path) == (api, path)
    assert (address.owner, address.name) == tuple(path.split("/")[-2:])


@pytest.mark.parametrize(
    "url",
    [
        "/srv/repository",
        "file:///srv/repository",
        "https://github.com",
        "https://github.com/only",
        "https://h.example/../r",
        "https://h.example/o//r",
        "https://h.example:port/o/r",
        "https:///o/r",
        "nothing",
        "",
    ],
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(InvalidConfig, match="use an address such as"):
        RepositoryAddress.parse(url)


def test_an_error_shows_no_password() -> None:
    with pytest.raises(InvalidConfig) as refused:
        RepositoryAddress.parse("https://user:hush@h.example/only")
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "forge"),
    [
        ("https://github.com/o/r", "github"),
        ("git@github.com:o/r.git", "github"),
        ("https://team.ghe.com/o/r", "github"),
        ("https://gitlab.com/o/r", "gitlab"),
        ("https://codeberg.org/o/r", "gitea"),
        ("https://github.com.evil.example/o/r", None),
        ("https://git.example/o/r", None),
        ("/srv/repository", "none"),
        ("file:///srv/repository", "none"),
        ("../repository", "none"),
        ("nothing", None),
    ],
)
def test_a_known_host_names_its_forge(url: str, forge: ForgeKind | None) -> None:
    assert guess_forge(url) == forge
