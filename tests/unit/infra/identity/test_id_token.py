"""The check of ID tokens. Each lie is refused, and its twin shows that this check refuses it."""

from dataclasses import replace
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, KeySet, RSAKey

from infra.identity.oidc import id_token
from infra.identity.oidc.id_token import (
    Expected,
    SignInRefused,
    UnknownSigningKey,
    check_id_token,
    groups_of,
    read_keys,
)
from tests.kit.oidc_provider import shared_secret

NOW = 1_800_000_000
KEY = ECKey.generate_key("P-256", auto_kid=True)
SHARED = shared_secret("a-secret-of-thirty-two-characters")
EXPECTED = Expected("https://id.example.org", "headrace", "the-nonce")
TRUE: dict[str, Any] = {
    "iss": "https://id.example.org",
    "sub": "ada",
    "aud": "headrace",
    "iat": NOW,
    "exp": NOW + 300,
    "nonce": "the-nonce",
}


def keys(*more: Any) -> KeySet:
    return read_keys({"keys": [KEY.as_dict(private=False), *more]})


def signed(**lies: Any) -> str:
    claims = {name: value for name, value in {**TRUE, **lies}.items() if value is not None}
    return jwt.encode({"alg": "ES256", "kid": KEY.kid}, claims, KEY, algorithms=["ES256"])


def test_a_true_token_gives_its_claims() -> None:
    assert check_id_token(signed(), keys(), EXPECTED, now_s=NOW)["sub"] == "ada"
    listed = signed(aud=["headrace", "other"], azp="headrace")
    assert check_id_token(listed, keys(), EXPECTED, now_s=NOW)["sub"] == "ada"


@pytest.mark.parametrize(
    ("lie", "believed"),
    [
        ({"iss": "https://other.example.org"}, {"issuer": "https://other.example.org"}),
        ({"aud": "other"}, {"client_id": "other"}),
        ({"aud": "other", "azp": "headrace"}, None),
        ({"aud": ["headrace", "other"]}, None),
        ({"aud": ["headrace", "other"], "azp": "other"}, None),
        ({"nonce": "another"}, {"nonce": "another"}),
        ({"nonce": None}, {"nonce": ""}),
        ({"exp": NOW - 61}, {"now_s": NOW - 30}),
        ({"exp": None}, None),
        ({"iat": NOW + 90}, {"now_s": NOW + 60}),
        ({"nbf": NOW + 120}, {"now_s": NOW + 120}),
        ({"sub": ""}, None),
        ({"sub": 7}, None),
        ({"sub": "x" * 256}, None),
        ({"sub": None}, None),
        ({"exp": "tomorrow"}, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_lie_is_refused_by_the_check_of_its_claim(
    lie: dict[str, Any], believed: dict[str, Any] | None
) -> None:
    with pytest.raises(SignInRefused):
        check_id_token(signed(**lie), keys(), EXPECTED, now_s=NOW)
    if believed is not None:  # the same token, where exactly the lie is expected
        now_s = believed.pop("now_s", NOW)
        found = check_id_token(signed(**lie), keys(), replace(EXPECTED, **believed), now_s=now_s)
        assert found["sub"] == "ada"


@pytest.mark.filterwarnings("ignore::joserfc.errors.SecurityWarning")
def test_a_token_without_a_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = jwt.encode({"alg": "none"}, TRUE, KEY, algorithms=["none"])
    with pytest.raises(SignInRefused):
        check_id_token(text, keys(), EXPECTED, now_s=NOW)
    monkeypatch.setattr(id_token, "ALGORITHMS", ("none",))
    assert check_id_token(text, keys(), EXPECTED, now_s=NOW)["sub"] == "ada", "the list refuses it"


def test_a_token_signed_with_a_shared_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    published = {**SHARED.as_dict(private=True), "kid": "shared"}
    text = jwt.encode({"alg": "HS256", "kid": "shared"}, TRUE, SHARED, algorithms=["HS256"])
    with pytest.raises(SignInRefused):
        check_id_token(text, keys(published), EXPECTED, now_s=NOW)
    monkeypatch.setattr(id_token, "KEY_TYPES", ("RSA", "EC", "oct"))
    with pytest.raises(SignInRefused):
        check_id_token(text, keys(published), EXPECTED, now_s=NOW)
    monkeypatch.setattr(id_token, "ALGORITHMS", ("HS256",))
    assert check_id_token(text, keys(published), EXPECTED, now_s=NOW)["sub"] == "ada"


def test_a_token_of_an_unknown_key_may_be_one_of_a_newer_key() -> None:
    other = ECKey.generate_key("P-256", auto_kid=True)
    with pytest.raises(UnknownSigningKey):
        check_id_token(
            signed(), read_keys({"keys": [other.as_dict(private=False)] * 2}), EXPECTED, now_s=NOW
        )


def test_a_token_whose_bytes_were_changed_is_refused() -> None:
    head, body, signature = signed().split(".")
    for text in ("", "a.b.c", f"{head}.{body}.", f"{head}.{body}x.{signature}", "." * 5000):
        with pytest.raises(SignInRefused):
            check_id_token(text, keys(), EXPECTED, now_s=NOW)


def test_only_keys_that_sign_count() -> None:
    usable = RSAKey.generate_key(2048, auto_kid=True).as_dict(private=False)
    odd = [{}, 7, {"kty": "XYZ"}, {"kty": "EC", "crv": "P-0"}, {**usable, "use": "enc"}]
    assert [key.kid for key in keys(*odd, usable)] == [KEY.kid, usable["kid"]]
    wrong: object
    for wrong in (None, [], {"keys": {}}, "text"):
        with pytest.raises(ValueError):
            read_keys(wrong)


def test_groups_are_names_in_a_list_or_one_name() -> None:
    assert groups_of({"groups": ["a", "b"]}, "groups") == {"a", "b"}
    assert groups_of({"roles": "a"}, "roles") == {"a"}
    assert groups_of({}, "groups") == frozenset()
    odd: list[Any] = [{"a": 1}, [1], 7, [["a"]]]
    for wrong in odd:
        with pytest.raises(SignInRefused, match="not a list of names"):
            groups_of({"groups": wrong}, "groups")
    with pytest.raises(SignInRefused, match="too many"):
        groups_of({"_claim_names": {"groups": "src1"}}, "groups")
