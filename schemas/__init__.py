"""The language that all other packages import, and so the first to meet an old Python."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - a source checkout can be started with any Python
    sys.exit(
        f"Headrace needs Python 3.11 or newer; this is Python {sys.version.split()[0]} "
        f"({sys.executable})"
    )
