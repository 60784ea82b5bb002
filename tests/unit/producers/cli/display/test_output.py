"""The result of a command: one of its two forms is printed, then its failure is raised."""

from collections.abc import Iterator
from functools import partial

import pytest

from producers.cli.display.output import Output, Part, fields, say, table
from producers.cli.errors import Failure


def test_people_get_the_parts_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    last = partial(say, "last")
    parts: tuple[Part, ...] = ("first", None, ["second", ("third", None)], last)
    assert Output({"key": 1}, *parts).print(as_json=False) == 0
    assert capsys.readouterr().out == "first\nsecond\nthird\nlast\n"


def test_programs_get_the_document_and_no_part_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    def describe() -> Iterator[str]:
        raise KeyError("a field that the server of another release does not send")
        yield

    assert Output({"key": 1}, describe(), exit_code=1).print(as_json=True) == 1
    assert capsys.readouterr().out == '{"schema_version": 1, "key": 1}\n'


@pytest.mark.parametrize("as_json", [True, False])
def test_a_failure_is_raised_after_the_result_is_printed(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Failure, match="differs"):
        Output({"key": 1}, "text", failure=Failure("DIFFERS", "it differs")).print(as_json=as_json)
    assert capsys.readouterr().out


def test_an_empty_table_is_its_text_where_it_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    columns = ("name",)
    for part in (
        table("A", columns, [], empty="no rows"),
        table("B", columns, []),
        fields("C", []),
    ):
        Output({}, part).print(as_json=False)
    out = capsys.readouterr().out
    assert out.startswith("no rows\n")
    assert "B" in out
    assert out.endswith("C\n")
