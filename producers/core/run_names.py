"""Names for runs without a name: an adjective, a noun and a number, derived from the run's id."""

from hashlib import sha256

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
