"""Named queries: the syntax of their files, and that the files and the code name the same
queries."""

import ast
import re
from collections import defaultdict

import pytest

from infra.spine.postgres.queries import ROOT, BadQueries, Queries, queries

INFRA = ROOT / "infra"
NAMED = re.compile(r'^SQL = queries\("([^"]+)"\)', re.M)

TEXT = """
-- What this file is.

-- part: columns
a, b

-- part: old
a < $1

-- part: new
-- from here on
a >= $1

-- A comment of what follows.

-- name: page
select {columns} from t -- as it is
where {age: old | new}

-- name: insert
insert into {table: ...} values ($1)
"""


def test_a_query_is_its_parts_put_together() -> None:
    found = Queries("t", TEXT)
    assert found.names == {"page", "insert"}
    assert found.variant("page", age="old").splitlines() == [
        "select a, b from t -- as it is",
        "where a < $1",
    ]
    assert found.variant("page", age="new").endswith("where a >= $1")
    assert found.variant("page", age="new") is found.variant("page", age="new")
    assert found.variant("insert", table="u") == "insert into u values ($1)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("select 1", "before the first name"),
        ("-- name: a\nselect 1\n-- name: a\nselect 2", "has a twice"),
        ("-- name: a\nselect 1\n-- part: a\nb", "has a twice"),
        ("-- name: a\n-- nothing\n-- name: b\nselect 1", "nothing below a"),
        ("-- name: a\nselect {b}", "a names 'b', which is not a part"),
        ("-- part: b\n1\n-- name: a\nselect {x: b | c}", "a names 'c', which is not a part"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadQueries, match=message):
        Queries("t", text)


def test_a_query_that_is_missing_or_incomplete_is_refused() -> None:
    found = Queries("t", TEXT)
    with pytest.raises(BadQueries, match="no query 'pages'"):
        found["pages"]
    with pytest.raises(BadQueries, match="no query 'columns'"):
        found["columns"]
    with pytest.raises(BadQueries, match=r"needs age as one of old \| new, not None"):
        found["page"]
    with pytest.raises(BadQueries, match="not 'columns'"):
        found.variant("page", age="columns")
    with pytest.raises(BadQueries, match="no size to choose"):
        found.variant("page", age="old", size="1")
    with pytest.raises(BadQueries, match=r"there is no .*nowhere\.sql"):
        queries("infra/nowhere.sql")


def test_every_query_is_used_and_every_used_one_is_there() -> None:
    used: dict[str, set[str]] = defaultdict(set)
    words: dict[str, set[str]] = defaultdict(set)
    for module in INFRA.rglob("*.py"):
        text = module.read_text()
        if (found := NAMED.search(text)) is None:
            continue
        file = found[1]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words[file].add(node.value)
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "SQL":
                used[file] |= _strings(node.slice)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "SQL.variant":
                used[file] |= _strings(node.args[0])
    files = {
        str(path.relative_to(ROOT))
        for path in INFRA.rglob("*.sql")
        if "-- name: " in path.read_text()
    }
    assert set(used) == files
    for file in files:
        names = queries(file).names
        assert not used[file] - names, file
        assert not names - words[file], file


def _strings(node: ast.expr) -> set[str]:
    return {
        leaf.value
        for leaf in ast.walk(node)
        if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)
    }
