"""The chains of the audit list: which tampering breaks them, and what a trim leaves whole."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from infra.identity.audit_chain import BEGINNING, chain_of, hash_of, verify

NOW = datetime(2026, 1, 1, 12, 30, 0, 123456, tzinfo=UTC)
Entries = list[dict[str, Any]]


def chained(count: int) -> Entries:
    """An export in which every third entry is of a change."""
    heads = {"changes": BEGINNING, "others": BEGINNING}
    made = []
    for number in range(count):
        entry: dict[str, Any] = {
            "id": 10 + number,
            "at": NOW + timedelta(seconds=number),
            "last_at": NOW + timedelta(seconds=number),
            "count": 1,
            "allowed": True,
            "api_key": "k",
            "owner": None,
            "workspace": "w",
            "organisation": "main",
            "address": "192.0.2.1",
            "method": "GET" if number % 3 else "POST",
            "route": "/runs",
            "subject": f"/api/v1/runs/{number}",
            "status": 200,
        }
        chain = chain_of(entry)
        entry["previous_sha256"] = heads[chain].hex()
        heads[chain] = hash_of(heads[chain], entry)
        entry["sha256"] = heads[chain].hex()
        made.append(entry)
    return made


def heads_of(entries: Entries) -> dict[str, Any]:
    """The last line of an export with these entries."""
    last = {"changes": BEGINNING.hex(), "others": BEGINNING.hex()}
    return {"heads": last | {chain_of(one): one["sha256"] for one in entries}}


def broken(entries: Entries, heads: dict[str, Any] | None = None) -> dict[str, int]:
    found = verify([*entries, heads or heads_of(entries)])
    return {name: one.broken_at for name, one in found.items() if one.broken_at is not None}


def test_a_chain_is_whole_also_as_the_text_of_an_export() -> None:
    entries = chained(12)
    assert broken(entries) == {}
    text = json.loads(json.dumps(entries, default=lambda moment: moment.isoformat()))
    for entry in text:
        entry["at"] = entry["at"].replace("+00:00", "Z")
    reports = verify([*text, heads_of(entries)])
    assert [(one.entries, one.broken_at) for one in reports.values()] == [(4, None), (8, None)]
    assert reports["changes"].head == entries[9]["sha256"]


@pytest.mark.parametrize("field", ["at", "owner", "organisation", "subject", "status", "count"])
def test_a_changed_field_breaks_its_chain(field: str) -> None:
    entries = chained(12)
    entries[6][field] = {"at": NOW, "status": 201, "count": 2}.get(field, "other")
    assert broken(entries) == {"changes": 16}


def drop(entries: Entries) -> None:
    del entries[4]


def swap(entries: Entries) -> None:
    for name in ("subject", "at", "last_at", "previous_sha256", "sha256"):
        entries[4][name], entries[5][name] = entries[5][name], entries[4][name]


def forge(entries: Entries) -> None:
    """Change an entry and compute its own hash again."""
    entries[4]["subject"] = "/other"
    entries[4]["sha256"] = hash_of(bytes.fromhex(entries[4]["previous_sha256"]), entries[4]).hex()


def blank(entries: Entries) -> None:
    entries[4]["sha256"] = entries[4]["previous_sha256"] = None


@pytest.mark.parametrize(("tamper", "at"), [(drop, 15), (swap, 14), (forge, 15), (blank, 14)])
def test_tampering_breaks_the_chain_where_it_was(
    tamper: Callable[[Entries], None], at: int
) -> None:
    entries = chained(12)
    tamper(entries)
    assert broken(entries) == {"others": at}


def test_a_chain_is_whole_from_its_oldest_kept_entry_on() -> None:
    entries = chained(30)
    kept = [one for one in entries if one["id"] > (30 if chain_of(one) == "others" else 20)]
    assert broken(kept) == {}
    before = [{**one, "sha256": None, "previous_sha256": None, "id": 1} for one in chained(3)]
    assert broken([*before, *entries]) == {}, "entries from before there were chains"


def test_the_oldest_entries_cannot_lose_their_hashes() -> None:
    """They would pass for entries from before there were chains, whatever was written into them."""
    entries = chained(12)
    for number in (0, 1):
        entries[number] |= {"owner": "mallory", "sha256": None, "previous_sha256": None}
    assert broken(entries) == {"changes": 13, "others": 12}


@pytest.mark.parametrize(("kept", "at"), [(11, {"others": 20}), (9, {"changes": 16, "others": 18})])
def test_entries_that_are_missing_at_the_end_break_the_chain(kept: int, at: dict[str, int]) -> None:
    entries = chained(12)
    assert broken(entries[:kept], heads_of(entries)) == at


def test_chains_of_which_no_entry_is_left_are_broken() -> None:
    assert broken([], heads_of(chained(12))) == {"changes": 0, "others": 0}
    assert broken([]) == {}, "nothing was ever written"


def test_an_export_that_was_cut_or_goes_on_is_refused() -> None:
    entries = chained(12)
    for lines in (entries, entries[:5], []):
        with pytest.raises(ValueError, match="it was cut"):
            verify(lines)
    with pytest.raises(ValueError, match="after that of the heads"):
        verify([*entries[:6], heads_of(entries[:6]), *entries[6:], heads_of(entries)])
