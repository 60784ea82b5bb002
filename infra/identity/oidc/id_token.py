"""The check of an ID token (OpenID Connect Core, section 3.1.3.7): signature, issuer, audience, time and
nonce. Authlib and joserfc do it. This module says what is allowed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from authlib.oidc.core import CodeIDToken
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import JWKRegistry, KeySet
from joserfc.jws import JWSRegistry

from schemas.errors import Refused
from schemas.text import plain

ALGORITHMS = tuple(f"{kind}{bits}" for kind in ("RS", "PS", "ES") for bits in (256, 384, 512))
"""The signatures that count. Without `none`, and without those whose key both sides have."""

KEY_TYPES = ("RSA", "EC")
LEEWAY_S = 60
"""How far the clocks of the two servers may differ."""

LONGEST_SUBJECT = 255
MOST_KEYS = 100


class SignInRefused(Refused):
    """A sign-in with the provider that opens no session. The message says what to do."""

    code = "SIGN_IN_REFUSED"
    status = 403


class UnknownSigningKey(SignInRefused):
    """The ID token is signed with a key that is not among the known ones."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The values that an ID token must hold."""

    issuer: str
    client_id: str
    nonce: str
    access_token: str | None = None


def read_keys(document: Any) -> KeySet:
    """The keys of a JWK set that may sign ID tokens. Others in it do not count. Raises ValueError for
    what is not a set."""
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise ValueError("the keys of the provider are not a JWK set")
    return KeySet([key for one in listed[:MOST_KEYS] if (key := _key_of(one)) is not None])


def check_id_token(text: str, keys: KeySet, expected: Expected, *, now_s: int) -> Mapping[str, Any]:
    """The claims of an ID token. Raises SignInRefused, and UnknownSigningKey when the keys may be too
    old."""
    registry = JWSRegistry(algorithms=list(ALGORITHMS), strict_check_header=False)
    try:
        token = jwt.decode(text, keys, registry=registry)
        claims = CodeIDToken(
            token.claims,
            token.header,
            {
                "iss": {"essential": True, "value": expected.issuer},
                "aud": {"essential": True, "value": expected.client_id},
            },
            {
                "nonce": expected.nonce,
                "client_id": expected.client_id,
                "access_token": expected.access_token,
            },
        )
        claims.validate(now=now_s, leeway=LEEWAY_S)
    except InvalidKeyIdError as error:
        raise UnknownSigningKey(
            "the ID token of the provider is signed with a key that the provider does not publish; sign "
            "in again"
        ) from error
    except (JoseError, ValueError, TypeError, RecursionError) as error:
        raise SignInRefused(
            f"the ID token of the provider does not hold: {plain(str(error))[:200]}; sign in again, and "
            "ask the operator if that does not help"
        ) from error
    _check_subject(claims.get("sub"))
    return dict(claims)


def _check_subject(subject: object) -> None:
    is_good = isinstance(subject, str) and 0 < len(subject) <= LONGEST_SUBJECT
    if not (is_good and str(subject).isprintable()):
        raise SignInRefused("the ID token of the provider names nobody (sub); ask the operator")


def _key_of(value: Any) -> Any:
    """A key of a set, if it may sign; None for one of a kind that is not known or not public."""
    if not isinstance(value, dict) or value.get("kty") not in KEY_TYPES:
        return None
    if value.get("use", "sig") != "sig":
        return None
    try:
        return JWKRegistry.import_key(value)
    except (JoseError, ValueError, TypeError, KeyError):
        return None


def groups_of(claims: Mapping[str, Any], claim: str) -> frozenset[str]:
    """The groups in a claim: a list of names, or one name. Raises SignInRefused for anything else, and
    when the provider left them out because there are too many."""
    elsewhere = claims.get("_claim_names")
    if isinstance(elsewhere, dict) and claim in elsewhere:
        raise SignInRefused(
            f"the provider does not send the groups, because there are too many of them; ask the "
            f"operator to let the provider send only those that count in the claim {claim}"
        )
    value = claims.get(claim)
    listed: Sequence[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(one, str) for one in listed):
        raise SignInRefused(
            f"the claim {claim} of the provider is not a list of names; ask the operator to set "
            "HEADRACE_OIDC_GROUPS_CLAIM to the claim that holds the groups"
        )
    return frozenset(listed)
