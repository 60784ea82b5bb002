"""Templates of run names in triggers, such as `{branch}-{short_sha}`.

A field is found by a regular expression. A template is never given to `str.format`, because it comes
from a repository that is not trusted, and `str.format` reads attributes.
"""

import difflib
import re
from collections.abc import Mapping

from schemas.toml.violations import violation

FIELDS = ("workspace", "branch", "tag", "ref", "sha", "short_sha", "config", "number", "date")
DEFAULT_TEMPLATE = "{config}-{short_sha}"
LONGEST_TEMPLATE = 200
LONGEST_NAME = 100

FIELD = re.compile(r"\{([^{}]*)\}")
OTHER = re.compile(r"[^A-Za-z0-9._-]+")


def check_template(template: str) -> str:
    """Return the template. Raises an error for pydantic when it has an unknown field, or a brace without
    its partner."""
    for name in FIELD.findall(template):
        if name not in FIELDS:
            close = difflib.get_close_matches(name[:64], FIELDS, n=1)
            meant = f"; did you mean {{{close[0]}}}?" if close else ""
            raise violation(
                f"must use only the fields {', '.join(FIELDS)}, not {{{name[:64]}}}{meant}"
            )
    if re.search(r"[{}]", FIELD.sub("", template)):
        raise violation("must have { and } only around the name of a field")
    return template


def fill_template(template: str, fields: Mapping[str, str]) -> str:
    """Return the run name of a template: each field is replaced, then everything that a run name may
    not hold. A field without a value is empty. A name with nothing left is that of the default
    template."""
    filled = FIELD.sub(lambda field: fields.get(field[1], ""), template)
    name = OTHER.sub("-", filled).lstrip("._-")[:LONGEST_NAME].rstrip("-")
    return name or fill_template(DEFAULT_TEMPLATE, {**fields, "config": "run"})
