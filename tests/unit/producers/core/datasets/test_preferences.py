"""Preferences in a dataset file: which forms are read, and how an error names a row that is wrong."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from producers.core.datasets.column_statistics import compute_statistics
from producers.core.datasets.mapping import unread
from producers.core.datasets.rules import FileReport, check_file
from schemas.datasets import DatasetRow, parse_rows, preference_form
from schemas.sampling import Message

SYSTEM = {"role": "system", "content": "Be short."}
QUESTION = {"role": "user", "content": "2?"}
ASKED = (Message(role="system", content="Be short."), Message(role="user", content="2?"))
CALL = {"id": "a", "function": {"name": "add", "arguments": {}}}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def check(
    directory: Path, *rows: Mapping[str, Any], kind: str = "jsonl", text: str | None = None
) -> tuple[FileReport, list[DatasetRow]]:
    path = directory / f"file.{kind}"
    path.write_text(text or "".join(json.dumps(row) + "\n" for row in rows))
    written: list[bytes] = []
    report = check_file(path, kind, written.append)
    return report, list(parse_rows(b"".join(written)))


def four(**row: Any) -> list[dict[str, Any]]:
    return [row] * 4


PAIRED: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "2?", "chosen": "two", "rejected": "three"},
    "messages": {
        "prompt": [SYSTEM, QUESTION],
        "chosen": [said("two")],
        "rejected": [said("three")],
    },
    "an implicit prompt": {
        "chosen": [SYSTEM, QUESTION, said("two")],
        "rejected": [SYSTEM, QUESTION, said("three")],
    },
    "a prompt twice": {
        "prompt": "2?",
        "chosen": [SYSTEM, QUESTION, said("two")],
        "rejected": [SYSTEM, QUESTION, said("three")],
    },
    "a conversation twice": {
        "prompt": [SYSTEM, QUESTION],
        "chosen": [SYSTEM, QUESTION, said("two")],
        "rejected": [SYSTEM, QUESTION, said("three")],
    },
    "texts after messages": {"prompt": [SYSTEM, QUESTION], "chosen": "two", "rejected": "three"},
    "ShareGPT's form": {
        "prompt": [{"from": "system", "value": "Be short."}, {"from": "human", "value": "2?"}],
        "chosen": [{"from": "gpt", "value": "two"}],
        "rejected": [{"from": "gpt", "value": "three"}],
    },
}


@pytest.mark.parametrize("form", PAIRED)
def test_every_form_of_a_pair_becomes_the_same_row(tmp_path: Path, form: str) -> None:
    report, rows = check(tmp_path, *four(**PAIRED[form], score=1.5))
    assert report.issues == []
    prompt = ASKED[1:] if form == "texts" else ASKED
    assert rows == [DatasetRow(prompt=prompt, chosen="two", rejected="three")] * 4
    assert unread(report.columns) == ["score"]
    assert set("two") <= set(report.characters)


@pytest.mark.parametrize(
    "text",
    ['[{"from": "Bern", "to": "Basel"}]', '[{"role": "assistant", "content": "two"}]'],
)
def test_an_answer_that_is_json_text_stays_as_it_is(tmp_path: Path, text: str) -> None:
    """Only CSV has to write a list of messages as text."""
    rejected = text.replace("B", "C").replace("two", "three")
    report, rows = check(tmp_path, *four(prompt=text, chosen=text, rejected=rejected))
    assert report.issues == []
    asked = (Message(role="user", content=text),)
    assert rows == [DatasetRow(prompt=asked, chosen=text, rejected=rejected)] * 4


def test_a_completion_is_desirable_or_not(tmp_path: Path) -> None:
    rows = [{"prompt": "2?", "completion": f"a{n}", "label": n > 1} for n in range(4)]
    report, found = check(tmp_path, *rows)
    assert report.issues == []
    assert [(row.chosen, row.rejected) for row in found] == [
        (None, "a0"),
        (None, "a1"),
        ("a2", None),
        ("a3", None),
    ]
    assert all(row.label is None for row in found), "a label is a ground truth elsewhere"


def test_csv_holds_truths_and_messages_as_text(tmp_path: Path) -> None:
    text = "prompt,completion,label\n" + "2?,two,True\n2?,six,false\n" * 2
    report, rows = check(tmp_path, kind="csv", text=text)
    assert report.issues == []
    assert [row.chosen for row in rows] == ["two", None] * 2
    cells = [json.dumps([QUESTION, said(one)]).replace('"', '""') for one in ("two", "six")]
    line = ",".join(f'"{cell}"' for cell in cells)
    report, rows = check(tmp_path, kind="csv", text="chosen,rejected\n" + f"{line}\n" * 4)
    assert report.issues == []
    assert rows[0] == DatasetRow(prompt=ASKED[1:], chosen="two", rejected="six")


def test_an_answer_may_look_like_json(tmp_path: Path) -> None:
    report, rows = check(tmp_path, *four(prompt="json?", chosen='[{"a": 1}]', rejected="[{"))
    assert report.issues == []
    assert rows[0].chosen == '[{"a": 1}]'


PAIR: dict[str, Any] = PAIRED["texts"]
BAD_ROWS: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({**PAIR, "rejected": "two"}, "rejected", "equals chosen"),
    ({**PAIR, "rejected": " "}, "rejected", "has an empty answer"),
    ({**PAIR, "chosen": [said("")], "rejected": [said("b")]}, "chosen", "has an empty answer"),
    ({**PAIR, "prompt": ""}, "prompt", "is missing; give the prompt"),
    ({"question": "2?", "chosen": "a", "rejected": "b"}, "prompt", "with --map COLUMN=prompt"),
    ({**PAIR, "prompt": " "}, "prompt", "is empty"),
    ({**PAIR, "prompt": [said("hello")]}, "prompt", "ends with the assistant; end it with"),
    ({**PAIR, "prompt": None}, "prompt", "is missing"),
    ({**PAIR, "rejected": [said("b")]}, "rejected", "is messages but chosen is text"),
    ({**PAIR, "chosen": [QUESTION], "rejected": [said("b")]}, "chosen", "ends with the user"),
    ({**PAIR, "chosen": [], "rejected": [said("b")]}, "chosen", "is an empty list"),
    (
        {**PAIR, "chosen": 3},
        "chosen",
        "must be text or a list of {role, content}, got number; correct",
    ),
    ({**PAIR, "rejected": None}, "rejected", "got null; correct it, or remove the row"),
    ({**PAIR, "chosen": [said("", tool_calls=[CALL])]}, "chosen", "ends with a call of a tool"),
    ({**PAIR, "chosen": [said("a", reasoning="b")]}, "chosen", "reasoning, which is not learned"),
    (
        {"chosen": [QUESTION, said("a")], "rejected": [SYSTEM, QUESTION, said("b")]},
        "rejected",
        "differs from chosen before its last message",
    ),
    (
        {"prompt": "3?", "chosen": [QUESTION, said("a")], "rejected": [QUESTION, said("b")]},
        "prompt",
        "is not the last message before the answers",
    ),
    (
        {"prompt": [SYSTEM], "chosen": [QUESTION, said("a")], "rejected": [QUESTION, said("b")]},
        "prompt",
        "differs from the messages before the answers",
    ),
    ({"chosen": "a", "rejected": "b"}, "prompt", "is missing"),
    ({"prompt": "2?", "completion": "a", "label": 1}, "label", "must be true or false"),
    ({"prompt": "2?", "completion": "a", "label": "good"}, "label", "got 'good'"),
    ({"prompt": "2?", "completion": "a", "label": None}, "label", "got null"),
    ({"prompt": "2?", "completion": "", "label": True}, "completion", "has an empty answer"),
    ({**PAIR, "tools": [3]}, "tools", "must be a tool with function.name"),
)


@pytest.mark.parametrize(("row", "column", "message"), BAD_ROWS)
def test_a_bad_row_is_refused_with_its_line_and_column(
    tmp_path: Path, row: dict[str, Any], column: str, message: str
) -> None:
    report, rows = check(tmp_path, *four(**row))
    assert rows == []
    first = report.issues[0]
    assert (first.line, first.column) == (1, column)
    assert message in first.message


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (("prompt", "chosen"), "has chosen but no column rejected; a preference needs both"),
        (("prompt", "accepted", "rejected"), "read another one as it with --map COLUMN=chosen"),
        (("prompt", "chosen", "rejected", "user_prompt"), "beside user_prompt; keep the columns"),
        (("chosen", "messages"), "has chosen beside messages; keep the columns"),
        (("prompt", "chosen", "rejected", "completion"), "beside completion; keep the columns"),
        (("prompt", "completion"), "add the column label (true or false) for kto, or"),
    ],
)
def test_columns_of_several_forms_are_refused(
    tmp_path: Path, columns: tuple[str, ...], message: str
) -> None:
    report, _ = check(tmp_path, *four(**dict.fromkeys(columns, "a")))
    assert message in report.issues[0].message


def test_a_pair_without_one_answer_is_refused_with_the_way_out(tmp_path: Path) -> None:
    [issue] = check(tmp_path, *four(**PAIR), {"prompt": "2?", "chosen": "two"})[0].issues
    assert (issue.line, issue.column) == (5, "rejected")
    assert issue.message == "is missing, and the first row has it; add it, or remove the row"


def test_one_type_per_column_holds_for_preferences_too(tmp_path: Path) -> None:
    report, _ = check(tmp_path, *four(**PAIR), {**PAIR, "prompt": [QUESTION]})
    assert "use one type per column" in report.issues[0].message


def test_a_row_without_preferences_is_written_as_before() -> None:
    row = DatasetRow(prompt=ASKED[1:], label="two")
    assert row.to_line() == (
        b'{"prompt":[{"role":"user","content":"2?"}],"label":"two","metadata":{}}\n'
    )


def test_columns_name_the_form() -> None:
    assert preference_form(("chosen", "rejected")) == "paired"
    assert preference_form(("prompt", "completion", "label", "x")) == "binary"
    assert preference_form(("prompt", "completion")) is None
    assert preference_form(("user_prompt", "completion", "label")) is None
    assert preference_form(("metadata", "completion", "label")) is None
    assert unread(("user_prompt", "label", "prompt", "completion")) == ["prompt", "completion"]


def test_pairs_that_repeat_the_chosen_answer_as_messages_are_accepted(tmp_path: Path) -> None:
    """As in public datasets of pairs, which can be used for supervised learning too."""
    rows = [{**PAIR, "messages": [QUESTION, {"role": "assistant", "content": "2"}]}] * 4
    report, kept = check(tmp_path, *rows)
    assert report.issues == []
    assert [row.chosen for row in kept] == [PAIR["chosen"]] * 4
    assert unread(tuple(rows[0])) == ["messages"]


def test_statistics_count_a_prompt_that_occurs_twice(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({**PAIR, "prompt": p}) + "\n" for p in "aab"))
    with path.open("rb") as file:
        assert compute_statistics(file, "jsonl", mapping={}).duplicates == 1


@pytest.mark.parametrize(
    ("cell", "margin"), [(0.5, 0.5), (2, 2.0), ("1.5", 1.5), (0, 0.0), ("", None), (None, None)]
)
def test_a_pair_may_have_a_margin(tmp_path: Path, cell: object, margin: float | None) -> None:
    report, rows = check(tmp_path, *four(**PAIR, margin=cell))
    assert not report.issues
    assert [row.margin for row in rows] == [margin] * 4
    assert ("margin" in rows[0].model_dump()) == (margin is not None)
    assert "margin" not in unread((*PAIR, "margin"))


@pytest.mark.parametrize("cell", [-1, True, "far", [1], 1e7, float("nan"), float("inf")])
def test_a_margin_that_is_not_a_number_is_refused(tmp_path: Path, cell: object) -> None:
    report, _ = check(tmp_path, *four(**PAIR, margin=cell))
    assert {issue.column for issue in report.issues} <= {"margin", None}
    assert report.issues
