"""The search box of the list of runs: words that names contain, and `key:value` for exact values."""

import re
from collections.abc import Mapping

SEARCH_KEYS = ("status", "dataset", "model", "rollout", "workspace", "creator", "tag", "archived")
"""The keys of a search. Each is also a parameter of the list."""

TERM = re.compile(r'(?:(?P<key>[a-z]+):)?(?:"(?P<quoted>[^"]*)"|(?P<plain>\S+))', re.IGNORECASE)


def parse_search(text: str) -> tuple[str, Mapping[str, str]]:
    """Return the words of a search, and the values of its keys, of which the last one counts. A term
    with an unknown key, or without a value, is a word."""
    words: list[str] = []
    values: dict[str, str] = {}
    for term in TERM.finditer(text):
        key = (term["key"] or "").lower()
        value = term["plain"] if term["quoted"] is None else term["quoted"]
        if key in SEARCH_KEYS and value:
            values[key] = value
        else:
            words.append(term[0] if term["key"] else value)
    return " ".join(word for word in words if word), values
