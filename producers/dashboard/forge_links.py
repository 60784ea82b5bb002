"""Links to the pages of forges, made only of parts that are safe in an address."""

import re
from collections.abc import Mapping

from infra.repositories.forges.address import RepositoryAddress, guess_forge
from schemas.errors import InvalidConfig

SHA = re.compile(r"[0-9a-fA-F]{7,64}")
ORIGIN = re.compile(r"https://(?:[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
PATH = re.compile(r"[A-Za-z0-9._~-]+(?:/[A-Za-z0-9._~-]+)+")
LONGEST_PATH = 500

COMMITS: Mapping[str | None, str] = {"github": "commit", "gitea": "commit", "gitlab": "-/commit"}
"""The folder of a repository's commits on each forge that has pages."""


def commit_address(repository: str, sha: str | None, *, forge: str | None = None) -> str | None:
    """Return the web address of a commit, which begins with `https://` and holds no credentials. None
    when there is no such page: the forge is not known, it is not reached over https, or `sha` is not
    the hexadecimal name of a commit. `forge` is the forge that the repository is connected to;
    without one the host says which forge it is."""
    if sha is None or SHA.fullmatch(sha) is None or not sha.strip("0"):
        return None
    folder = COMMITS.get(forge) or COMMITS.get(guess_forge(repository))
    if folder is None:
        return None
    try:
        address = RepositoryAddress.parse(repository)
    except InvalidConfig:
        return None
    is_safe = ORIGIN.fullmatch(address.origin) and PATH.fullmatch(address.path)
    if not is_safe or len(address.path) > LONGEST_PATH:
        return None
    return f"{address.origin}/{address.path}/{folder}/{sha}"
