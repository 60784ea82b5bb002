"""Passwords and API keys in text that is shown or logged are replaced by ***."""

import re

HIDDEN = "***"

IN_URL = re.compile(r"(?P<begin>[A-Za-z][A-Za-z0-9+.-]*://[^\s/:@'\"]*):[^\s/@'\"]*@")
"""`scheme://user:password@`."""

IN_PARAMETER = re.compile(
    r"(?P<begin>\b(?:ssl)?pass(?:word|wd|file)?\s*=\s*)(?:'[^']*'|[^\s&'\"]+)", re.IGNORECASE
)
"""`password=...`, of a query or of a connection string."""


IN_API_KEY = re.compile(r"\b(?P<begin>hr_[0-9a-z]{10}_)[0-9A-Za-z]{49}\b")
"""An API key of Headrace. Its id may be shown."""


def redact(text: str) -> str:
    """`text` without the passwords of URLs and connection strings, and without API keys."""
    if "hr_" in text:
        text = IN_API_KEY.sub(rf"\g<begin>{HIDDEN}", text)
    if "@" not in text and "pass" not in text.lower():
        return text
    text = IN_URL.sub(rf"\g<begin>:{HIDDEN}@", text)
    return IN_PARAMETER.sub(rf"\g<begin>{HIDDEN}", text)


def redact_setting(value: str) -> str:
    """A setting's value as an error shows it. The value may be malformed, so everything that could be
    a password is hidden: the text between the scheme (and a user's name) and the last @."""
    scheme, separator, rest = value.rpartition("://")
    if "@" in rest:
        login, _, place = rest.rpartition("@")
        rest = (
            f"{login.partition(':')[0]}:{HIDDEN}@{place}" if ":" in login else f"{HIDDEN}@{place}"
        )
    return redact(f"{scheme}{separator}{rest}")
