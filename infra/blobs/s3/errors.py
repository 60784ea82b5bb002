"""Classifies a failed call to an S3 store: whether the next try may succeed, and what a person should
do.

S3 answers with an HTTP status and a code. Stores that only resemble S3 share the statuses more than the
codes, so the status decides wherever it can. Whether a request without an answer took effect is not
known here, so the adapter makes every request safe to repeat.
"""

from collections.abc import Mapping
from typing import Any

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ResponseStreamingError,
    SSLError,
)
from botocore.exceptions import (
    ConnectionError as NoConnection,
)
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from schemas.errors import StoreAway


class CutAnswer(Exception):
    """An answer with a good status lacks fields that every such answer has. The connection ended inside
    the headers, and boto3 takes the headers for complete."""


S3Error = (ClientError, BotoCoreError, ResponseParserError, HTTPError, CutAnswer)
"""Everything that a request may raise. urllib3's own errors appear where a refusal is cut off."""


class StoreRefuses(StoreAway):
    """The store refuses for a reason that only a person can change: keys, grants, a bucket, a full disk.
    At start the process ends. During a run the work waits, because somebody may be rotating keys."""


TAKEN = 412
MISSING = 404
ABSENT = frozenset({"NoSuchKey", "NoSuchUpload", "404"})
NOT_IMPLEMENTED = 501

PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Statuses of a store that is busy, restarting, or writing the same key for another client."""

GARBLED = frozenset(
    {
        "BadDigest",
        "IncompleteBody",
        "InvalidDigest",
        "RequestTimeout",
        "XAmzContentSHA256Mismatch",
    }
)
"""Codes (with status 400) of a body that did not arrive as it was sent; the next try may succeed."""

UNKNOWN_KEY = "does not know the access key; set AWS_ACCESS_KEY_ID to one of its keys"
FORBIDDEN = {
    "InvalidAccessKeyId": UNKNOWN_KEY,
    "XAdminUserNotFound": UNKNOWN_KEY,
    "SignatureDoesNotMatch": "says that the secret key is wrong; set AWS_SECRET_ACCESS_KEY to the "
    "secret of that access key",
    "ExpiredToken": "says that the credentials have expired; get new ones",
    "RequestTimeTooSkewed": "says that the clock of this machine is wrong; set it (NTP)",
}
"""Code -> the reason and what to do, for a request that was refused because of our identity or clock."""

GRANTS = "s3:PutObject, s3:GetObject, s3:DeleteObject and s3:ListBucket"


def status(error: Exception) -> int | None:
    """The HTTP status, or None when the store did not answer."""
    if not isinstance(error, ClientError):
        return None
    found = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return found if isinstance(found, int) else None


def code(error: Exception) -> str:
    """The store's own name of the error. An answer without a body (HEAD) has only its status."""
    if not isinstance(error, ClientError):
        return ""
    return str(error.response.get("Error", {}).get("Code", ""))


def require_fields(answer: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return the answer if it has all of these fields. Raises CutAnswer."""
    missed = [name for name in names if name not in answer]
    if missed:
        raise CutAnswer(f"its answer broke off before {', '.join(missed)}")
    return answer


def is_passing(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, ClientError):
        return status(error) in PASSING or code(error) in GARBLED
    if isinstance(error, SSLError):
        return False
    return isinstance(
        error,
        CutAnswer
        | HTTPError
        | NoConnection
        | HTTPClientError
        | IncompleteReadError
        | ResponseParserError
        | ResponseStreamingError,
    )


def is_missing(error: Exception) -> bool:
    """Whether the store said that the object does not exist, and not the bucket, account or page."""
    return status(error) == MISSING and code(error) in ABSENT


def explain(error: Exception, *, bucket: str, place: str) -> str:
    """One line that says what the store at `place` refused, and what to do next."""
    name = code(error)
    if isinstance(error, NoCredentialsError | PartialCredentialsError | CredentialRetrievalError):
        return (
            f"there are no credentials for the S3 store at {place} ({error}); set AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY, or any other source that boto3 knows"
        )
    if name == "NoSuchBucket":
        return (
            f"the S3 store at {place} has no bucket {bucket}; create it, or name another in "
            "HEADRACE_BLOBS"
        )
    if name in FORBIDDEN:
        return f"the S3 store at {place} {FORBIDDEN[name]}"
    if status(error) in (401, 403):
        what = getattr(error, "operation_name", "this")
        return (
            f"the S3 store at {place} forbids {what} in bucket {bucket}; grant these credentials "
            f"{GRANTS} there"
        )
    if status(error) == NOT_IMPLEMENTED or name == "NotImplemented":
        return (
            f"the S3 store at {place} does not implement a request ({error}); use one with "
            "conditional writes (PutObject with If-None-Match: *)"
        )
    if status(error) is None:
        return (
            f"no S3 store answers at {place} ({error}); start it, or correct HEADRACE_S3_ENDPOINT"
        )
    if not name:
        return (
            f"the server at {place} does not answer as an S3 store does (status {status(error)}); "
            "correct HEADRACE_S3_ENDPOINT"
        )
    return f"the S3 store at {place} answered: {error}"
