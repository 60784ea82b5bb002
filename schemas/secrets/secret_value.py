"""A value that must not be shown: its text is returned by one method and by nothing else."""

import hmac
from typing import NoReturn

from schemas.secrets.redact import HIDDEN


class SecretValue:
    """The text of a secret. `repr`, `str` and formats show `***`. It cannot be pickled or written as
    JSON. A copy is the value itself."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text. Do not pass it to a log, an error or an event."""
        return self._text

    def __repr__(self) -> str:
        return HIDDEN

    def __format__(self, spec: str) -> str:
        return HIDDEN

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SecretValue):
            return NotImplemented
        return hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash(self._text)

    def __copy__(self) -> "SecretValue":
        return self

    def __deepcopy__(self, memo: object) -> "SecretValue":
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret cannot be pickled; pass its name")
