"""The types that all other packages share. It is imported first, so it checks the version of Python."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - a source checkout can be started with any Python
    sys.exit(
        f"Headrace needs Python 3.11 or newer; this is Python {sys.version.split()[0]} "
        f"({sys.executable})"
    )
