"""A TOML that takes much time or memory to parse is refused before it is parsed."""

import time

import pytest

from infra.ports.packages import LONGEST_LOCK
from schemas.errors import InvalidConfig
from schemas.toml.untrusted import DEEPEST, LONG_KEY, MOST_PARTS, parse_bounded_toml

LONG = "a." * DEEPEST + "a"
LONG_QUOTED = '"a\\".b". \'c.\' .' * (DEEPEST // 2) + "a"


def parse(text: str) -> dict[str, object]:
    return parse_bounded_toml(text.encode(), "uv.lock", most_bytes=LONGEST_LOCK)


@pytest.mark.parametrize(
    "text",
    [
        f"{LONG} = 1",
        f"version = 1\n\n  {LONG} = 1\n",
        f"[{LONG}]\n",
        f"[[ {LONG} ]]\r\n",
        f"{LONG_QUOTED} = 1",
        f"x = {{ {'a.' * 501}a = 1 }}",
    ],
)
def test_a_key_of_many_parts_is_refused_unread(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory for such keys grew with the square of their length, to gigabytes for 64 KiB."""
    monkeypatch.setattr("schemas.toml.untrusted.tomllib", None)
    with pytest.raises(InvalidConfig, match=r"uv\.lock is nested more than 32 levels deep"):
        parse(text)


def test_a_file_of_too_many_values_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schemas.toml.untrusted.tomllib", None)
    with pytest.raises(InvalidConfig, match=r"has more than 500000 keys, tables and lists"):
        parse("x = [" + "{}," * (MOST_PARTS // 2) + "]")


@pytest.mark.parametrize(
    "text",
    [" ", "\t", "a", '"', "'", '"a', '\\"', '"\\', " [", "[ ", "a\t", '"a" '],
)
def test_a_search_for_long_keys_takes_linear_time(text: str) -> None:
    """64 KiB of spaces would have held the process for minutes."""
    began = time.process_time()
    for first in ("", '"', "a.b. ", "[["):
        assert LONG_KEY.search((first + text * (1 << 18)).encode()) is None
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "text",
    [
        f'x = "{"1.2." * 200}"',
        f"x = [{'0.1, ' * 400}]",
        f"x = [\n{'0.1, ' * 400}]",
        "a." * (DEEPEST - 1) + "a = 1",
        'x = """\n' + "a.b " * 100 + '\n"""',
    ],
)
def test_texts_and_numbers_with_dots_are_read(text: str) -> None:
    assert parse(text)
