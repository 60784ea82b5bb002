"""Where in an S3 store the blobs lie: `s3://bucket/prefix`. Names only; it imports no client."""

import re
from dataclasses import dataclass

from infra.settings.blob_keys import check_key, check_prefix
from schemas.errors import NotFound

PLACE = re.compile(
    r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])"
    r"(/(?P<prefix>[A-Za-z0-9_@.-]+(/[A-Za-z0-9_@.-]+)*))?/?"
)


@dataclass(frozen=True, slots=True)
class S3Place:
    """A bucket, and the prefix in it below which everything of ours lies (no slash at its ends)."""

    bucket: str
    prefix: str = ""

    @classmethod
    def parse(cls, text: str) -> "S3Place":
        """Read `s3://bucket[/prefix]`. Raises ValueError when `text` is not of that form."""
        match = PLACE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not s3://bucket/prefix")
        prefix = match["prefix"] or ""
        check_prefix(prefix)
        return cls(bucket=match["bucket"], prefix=prefix)

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def object_key(self, key: str) -> str:
        """The store's own key. Raises ValueError when `key` is not a blob key."""
        check_key(key)
        return self._inside + key

    def listed(self, prefix: str) -> str:
        """What the store's own keys begin with, for keys that begin with `prefix`."""
        return self._inside + prefix

    def key(self, object_key: str) -> str:
        """The key of one of our objects."""
        return object_key.removeprefix(self._inside)

    def uri(self, key: str) -> str:
        return f"s3://{self.bucket}/{self.object_key(key)}"

    def located(self, uri: str) -> str:
        """The store's own key of a uri of ours. Raises NotFound for any other."""
        begin = f"s3://{self.bucket}/"
        object_key = uri.removeprefix(begin)
        if not uri.startswith(begin) or not object_key.startswith(self._inside):
            raise NotFound(f"{uri} is not in {self}")
        return object_key

    @property
    def _inside(self) -> str:
        return f"{self.prefix}/" if self.prefix else ""
