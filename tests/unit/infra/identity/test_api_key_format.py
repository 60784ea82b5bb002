"""The form of API keys: long, checkable without a database, and never shown by accident."""

import hashlib

from infra.identity.api_key_format import API_KEY, api_key_id, issue_api_key
from schemas.secrets.redact import redact


def test_an_api_key_is_found_by_its_id_and_has_256_bits() -> None:
    issued = issue_api_key()
    assert api_key_id(issued.text) == issued.id
    assert issued.text.startswith(f"{issued.prefix}_")
    assert len(issued.text) == len("hr_") + 10 + 1 + 43 + 6
    assert 62**43 > 2**256
    assert issued.sha256 == hashlib.sha256(issued.text.encode()).digest()
    assert len({issue_api_key().text for _ in range(100)}) == 100


def test_one_wrong_character_is_seen_without_a_database() -> None:
    text = issue_api_key().text
    wrong = [text[:n] + ("a" if text[n] != "a" else "b") + text[n + 1 :] for n in range(len(text))]
    wrong += [text[:-1], f"{text}x", f" {text}", text.upper(), "", "hr_", "é" * 63]
    assert [api_key_id(each) for each in wrong] == [None] * len(wrong)


def test_a_random_text_has_the_form_only_once_in_four_billion() -> None:
    guess = f"hr_{'a' * 10}_{'x' * 49}"
    assert API_KEY.fullmatch(guess)
    assert api_key_id(guess) is None


def test_the_text_of_an_api_key_is_in_no_repr_and_no_log_line() -> None:
    issued = issue_api_key()
    assert issued.text not in repr(issued)
    assert issued.text not in redact(f"refused Bearer {issued.text} at /api")
    assert issued.prefix in redact(f"refused {issued.text}")
