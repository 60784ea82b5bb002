"""Names of runs: which may be chosen, and one for a run without a name: an adjective, a noun and a
number, derived from the run's id."""

import re
from hashlib import sha256

from schemas.errors import Conflict, InvalidConfig, Issue
from schemas.ids import is_id

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")

ADJECTIVES = (
    "amber", "bold", "brisk", "calm", "clear", "crisp", "deep", "eager", "early", "fair", "fleet",
    "fresh", "gentle", "golden", "grand", "green", "keen", "light", "lively", "lucid", "mellow",
    "nimble", "noble", "patient", "plain", "proud", "quick", "quiet", "rapid", "ready", "rising",
    "round", "sharp", "silver", "simple", "sleek", "smooth", "solid", "steady", "still", "stout",
    "strong", "sturdy", "sunny", "sure", "swift", "tidy", "true", "vast", "vivid", "warm", "wide",
    "wild", "wise",
)  # fmt: skip
NOUNS = (
    "basin", "bay", "beck", "bend", "bridge", "brook", "burn", "canal", "cascade", "channel", "cove",
    "creek", "current", "dam", "delta", "eddy", "falls", "ferry", "flume", "ford", "fountain",
    "gorge", "harbor", "headland", "inlet", "island", "lagoon", "lake", "leat", "lock", "marsh",
    "mill", "mere", "narrows", "pond", "pool", "rapids", "reach", "reservoir", "ridge", "river",
    "shoal", "shore", "sluice", "sound", "spring", "strand", "strait", "stream", "tide", "torrent",
    "wave", "weir", "wheel",
)  # fmt: skip


def invented_name(identity: str, attempt: int = 0) -> str:
    """The name number `attempt` for an id. It is always the same."""
    digest = sha256(f"{identity}/{attempt}".encode()).digest()
    adjective = ADJECTIVES[int.from_bytes(digest[:2]) % len(ADJECTIVES)]
    noun = NOUNS[int.from_bytes(digest[2:4]) % len(NOUNS)]
    return f"{adjective}-{noun}-{int.from_bytes(digest[4:6]) % 900 + 100}"


def require_name(kind: str, name: str) -> None:
    """Raises InvalidConfig when a run or an evaluation (the `kind`) cannot have this name, and Conflict
    when it could be an id."""
    if not NAME.fullmatch(name):
        message = (
            f"{name!r} cannot name a {kind}; use letters, digits, '.', '_' and '-', at most 100"
        )
        raise InvalidConfig(message, issues=(Issue("name", message),))
    if is_id(name):
        raise Conflict(f"{name} could be the id of another {kind}; choose another name")


def used_name_error(kind: str, name: str) -> Conflict:
    """The error for a name that another run or evaluation has, with the commands that free it."""
    hint = f"`headrace eval delete {name}`"
    if kind == "run":
        hint = f"`headrace train rename {name} NEW` or `headrace train delete {name}`"
    return Conflict(
        f"the name {name} is already used by another {kind}; choose another name, or free it with {hint}"
    )
