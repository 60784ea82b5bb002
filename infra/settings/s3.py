"""The place of the blobs in an S3 store: `s3://bucket/prefix`. It imports no S3 client."""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from infra.settings.blob_keys import check_key, check_prefix
from schemas.errors import NotFound

PLACE = re.compile(
    r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])"
    r"(/(?P<prefix>[A-Za-z0-9_@.-]+(/[A-Za-z0-9_@.-]+)*))?/?"
)
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def is_public_endpoint(value: str) -> bool:
    """Whether clients may be sent to this address of a store: https, or http to the same machine, with
    no path, query or credentials."""
    try:
        parts = urlsplit(value)
        is_plain = parts.port != 0 and "@" not in parts.netloc and parts.path in ("", "/")
    except ValueError:
        return False
    is_safe = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK)
    return bool(is_plain and is_safe and parts.hostname and not parts.query and not parts.fragment)


@dataclass(frozen=True, slots=True)
class S3Place:
    """A bucket, and the prefix of all our objects in it, without a slash at either end."""

    bucket: str
    prefix: str = ""

    @classmethod
    def parse(cls, text: str) -> "S3Place":
        """Parse `s3://bucket[/prefix]`. Raises ValueError for other forms."""
        match = PLACE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not s3://bucket/prefix")
        prefix = match["prefix"] or ""
        check_prefix(prefix)
        return cls(bucket=match["bucket"], prefix=prefix)

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def object_key(self, key: str) -> str:
        """Return the object key of a blob key. Raises ValueError when `key` is not a blob key."""
        check_key(key)
        return self._inside + key

    def object_prefix(self, prefix: str) -> str:
        """Return the prefix of the object keys of all blob keys that begin with `prefix`."""
        return self._inside + prefix

    def key(self, object_key: str) -> str:
        """Return the blob key of one of our objects."""
        return object_key.removeprefix(self._inside)

    def uri(self, key: str) -> str:
        return f"s3://{self.bucket}/{self.object_key(key)}"

    def object_key_of(self, uri: str) -> str:
        """Return the object key of one of our URIs. Raises NotFound for any other URI."""
        begin = f"s3://{self.bucket}/"
        object_key = uri.removeprefix(begin)
        if not uri.startswith(begin) or not object_key.startswith(self._inside):
            raise NotFound(f"{uri} is not in {self}")
        return object_key

    @property
    def _inside(self) -> str:
        return f"{self.prefix}/" if self.prefix else ""
