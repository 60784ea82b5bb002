"""The rules for a dataset file, and how an error names the row that breaks one."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.core.datasets.mapping import as_query, from_query, mapping_of, unread
from producers.core.datasets.readers import MAX_ROW_BYTES
from producers.core.datasets.row_issues import (
    MAX_EXCERPT,
    MAX_KEY,
    MAX_MESSAGE,
    SHOWN_ISSUES,
    RowIssue,
    excerpt_of,
    file_issue,
    from_text,
    line_issue,
    to_text,
)
from producers.core.datasets.rules import FileReport, check_file
from schemas.datasets import DatasetRow, parse_rows
from schemas.errors import InvalidConfig


def check(
    tmp_path: Path, content: str | bytes, kind: str = "jsonl", **mapping: str
) -> tuple[FileReport, list[DatasetRow]]:
    path = tmp_path / f"file.{kind}"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    written: list[bytes] = []
    report = check_file(path, kind, written.append, mapping=mapping)
    return report, list(parse_rows(b"".join(written)))


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def good(count: int = 4, **more: Any) -> list[dict[str, Any]]:
    return [{"user_prompt": f"q{n}", "ground_truth": f"a{n}", **more} for n in range(count)]


def test_prompt_mode_keeps_prompt_and_label_only(tmp_path: Path) -> None:
    report, rows = check(tmp_path, lines(*good(system_prompt="s", extra=[1])))
    assert report.issues == []
    assert report.num_rows == 4
    assert [message.role for message in rows[0].prompt] == ["system", "user"]
    assert rows[1].label == "a1"
    assert rows[1].metadata == {}


def test_label_is_another_word_for_ground_truth_and_may_be_a_number(tmp_path: Path) -> None:
    report, rows = check(tmp_path, lines(*({"user_prompt": "q", "label": n} for n in range(4))))
    assert report.issues == []
    assert [row.label for row in rows] == ["0", "1", "2", "3"]


def test_metadata_mode_needs_no_prompt(tmp_path: Path) -> None:
    content = lines(*({"metadata": {"a": {"b": n}}} for n in range(4)))
    report, rows = check(tmp_path, content)
    assert report.issues == []
    assert rows[3].metadata == {"a": {"b": 3}}
    assert rows[3].prompt == ()


def talk(*turns: str, **more: Any) -> dict[str, Any]:
    """A conversation in which user and assistant take turns."""
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"messages": [{"role": "system", "content": "s"}, *said], **more}


CALL = {"id": "a", "function": {"name": "add", "arguments": {"l": 1}}}
OFFERED = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def called(calls: object, **more: Any) -> dict[str, Any]:
    """A conversation in which the assistant calls tools before it answers."""
    said = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_call_id": "a"},
        {"role": "assistant", "content": "two"},
    ]
    return {"messages": said, **more}


def test_calls_of_tools_and_the_tools_that_are_offered_are_read(tmp_path: Path) -> None:
    bare = {"name": "add", "arguments": '{"l":2}'}
    row = called([CALL, bare], tools=[OFFERED])
    report, rows = check(tmp_path, lines(*[row] * 4))
    assert report.issues == []
    first, second = rows[0].prompt[1].tool_calls
    assert (first.id, first.name, first.arguments) == ("a", "add", '{"l": 1}')
    assert (second.id, second.arguments) == ("call_1", '{"l":2}')
    assert rows[0].prompt[2].tool_call_id == "a"
    assert (rows[0].label, rows[0].tools[0].name) == ("two", "add")
    assert DatasetRow.model_validate_json(rows[0].to_line()) == rows[0]
    plain, _ = check(tmp_path, lines(*[talk("1?", "one")] * 4))
    assert plain.issues == []


def test_a_conversation_is_its_last_answer_and_what_came_before(tmp_path: Path) -> None:
    report, rows = check(tmp_path, lines(*(talk("1?", "one", "2?", f"two{n}") for n in range(4))))
    assert report.issues == []
    assert [m.role for m in rows[0].prompt] == ["system", "user", "assistant", "user"]
    assert rows[2].label == "two2"


def test_a_conversation_beside_a_label_is_a_prompt(tmp_path: Path) -> None:
    content = lines(*(talk("1?", "one", "2?", label=n) for n in range(4)))
    report, rows = check(tmp_path, content)
    assert report.issues == []
    assert len(rows[1].prompt) == 4
    assert rows[1].label == "1"


def test_a_conversation_in_csv_is_json_text(tmp_path: Path) -> None:
    cell = json.dumps(talk("1?", "one")["messages"]).replace('"', '""')
    report, rows = check(tmp_path, "messages\n" + f'"{cell}"\n' * 4, "csv")
    assert report.issues == []
    assert rows[3].label == "one"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (talk("1?"), "ends with the user; a demonstration ends with the assistant"),
        (talk("1?", "one", label="x"), "ends with the assistant; with a label"),
        (talk("1?", ""), "ends with an empty answer"),
        ({"messages": []}, "is an empty list"),
        ({"messages": "hello"}, "not a list of messages"),
        ({"messages": {"role": "user"}}, "must be a list"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "has only the answer"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "[0] needs a role of system, user"),
        ({"messages": ["hello"]}, "[0] must be an object"),
        (
            {"messages": [{"role": "user", "content": "a", "image": "x"}]},
            "[0] has 'image', which are not read; the fields are: content, name",
        ),
        (called([{"function": {}}]), "[1].tool_calls[0] must have function.name"),
        (called("add"), "[1].tool_calls must be a list of at most 128 calls"),
        ({"messages": called([CALL])["messages"][:2]}, "ends with a call of a tool"),
        (talk("1?", "one", tools=[{"type": "function"}]), "[0] must be a tool with function.name"),
        (talk("1?", "one", tools="add"), "is not a list of tools in JSON"),
        (talk("1?", "one", tools='[{"name": "\\ud800"}]'), "is not a list of tools in JSON"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content that is a str"),
        ({"messages": [], "user_prompt": "q"}, "keep one of the two forms"),
    ],
)
def test_a_conversation_that_cannot_be_is_named(
    tmp_path: Path, row: dict[str, Any], says: str
) -> None:
    report, _ = check(tmp_path, lines(*[row] * 4))
    assert says in report.issues[0].message


def test_csv_may_hold_metadata_as_json_text(tmp_path: Path) -> None:
    head = 'user_prompt,label,metadata\n"a, b",1,"{""k"": 1}"\n'
    report, rows = check(tmp_path, head + 'c,2,"{""k"": 2}"\n' * 3, "csv")
    assert report.issues == []
    assert rows[0].prompt[0].content == "a, b"
    assert rows[1].metadata == {"k": 2}


def test_a_byte_order_mark_and_blank_lines_are_no_problem(tmp_path: Path) -> None:
    report, rows = check(tmp_path, b"\xef\xbb\xbf" + lines(*good()).replace("\n", "\n\n").encode())
    assert report.issues == []
    assert len(rows) == 4


@pytest.mark.parametrize(
    ("content", "where", "says"),
    [
        ("", "file", "empty"),
        ("\n\n", "file", "empty"),
        (lines(*good(3)), "file", "has 3 rows; a dataset needs at least 4"),
        (lines({"prompt": "a", "ground_truth": "b"}), "file", "missing required columns: user_pr"),
        (lines(*good()) + "{oops\n", "line 5", "is not JSON"),
        (lines(*good()) + '{"user_prompt": "cut off\n', "line 5", "Unterminated string"),
        (lines(*good()) + "[1]\n", "line 5", "must be a JSON object, one in each line"),
        (lines(*good()) + '{"user_prompt": "\\ud800"}', "line 5", "is a lone surrogate"),
        (lines(*good()) + '{"user_prompt": NaN}', "line 5", "NaN"),
        (lines(*good()) + "[" * 100_000, "line 5", "nested"),
        (
            lines(*good(), {"user_prompt": "a", "ground_truth": 1}),
            "line 5, column ground_truth",
            "is a number and was a string in line 1",
        ),
        (
            lines(*good(), {"user_prompt": " ", "ground_truth": "x"}),
            "line 5, column user_prompt",
            "is empty",
        ),
        (
            lines(*({"user_prompt": 3, "ground_truth": "x"} for _ in range(4))),
            "line 1, column user_prompt",
            "must be a string",
        ),
        (
            lines(*good(), {"user_prompt": "a", "ground_truth": None}),
            "line 5, column ground_truth",
            "must be a string or a number",
        ),
        (lines(*good(), {"user_prompt": "a"}), "line 5, column ground_truth", "is missing"),
        (lines(*good(), *good(1, more=1)), "line 5, column more", "not in the first row"),
        (lines(*good(metadata={})), "line 1, column metadata", "at least one key"),
        (lines(*good(metadata="{")), "line 1, column metadata", "not a JSON object"),
        (lines(*good(metadata={"a": {}})), "line 1, column metadata.a", "empty object"),
        (lines(*good(metadata={"a": 2**70})), "line 1, column metadata.a", "64 bits"),
        (
            lines(*good(metadata={"a": 1}), *good(1, metadata={"a": "x"})),
            "line 5, column metadata.a",
            "is a string and was a number in line 1",
        ),
    ],
)
def test_a_problem_is_named_by_line_and_column(
    tmp_path: Path, content: str, where: str, says: str
) -> None:
    report, _ = check(tmp_path, content)
    assert report.issues, "nothing was found"
    assert report.issues[0].key == where
    assert says in report.issues[0].message


@pytest.mark.parametrize(
    ("content", "where", "says"),
    [
        ("user_prompt,label\na\n", "line 2", "has 1 cells; it must have 2"),
        ("a,a\n", "line 1", "twice"),
        ('user_prompt,label\n"a" b,c\n', "line 2", "is not CSV"),
        ("user_prompt,label\n", "file", "empty"),
        (
            "user_prompt;label\na, b;c\n",
            "line 1",
            "has ';' as the delimiter; save the file with co",
        ),
        ("user_prompt\tlabel\na\tc\n", "line 1", "has '\\t' as the delimiter"),
    ],
)
def test_broken_csv_is_named(tmp_path: Path, content: str, where: str, says: str) -> None:
    report, _ = check(tmp_path, content, "csv")
    if "a,a" in content:
        report, _ = check(tmp_path, content + "1,2\n", "csv")
    assert report.issues[0].key == where
    assert says in report.issues[0].message


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"question": "a", "answer": "b"},
            "missing required columns: user_prompt, ground_truth; read other columns as these with "
            "--map COLUMN=user_prompt --map COLUMN=ground_truth; it has: question, answer",
        ),
        (
            {"user_promt": "a", "label": "b"},
            "missing required columns: user_prompt; did you mean user_prompt instead of user_promt? "
            "Rename it; it has: user_promt, label",
        ),
        ({"conversations": []}, "; read it with --map conversations=messages; it has: conv"),
        ({"x" * 2001: 1, "user_prompt": "a", "label": "b"}, "2001 characters, 'xxx"),
        (
            dict.fromkeys((f"{n:03}" + "\u20ac" * 90 for n in range(250)), 1),
            "has names of columns of 69250 bytes in all; shorten them to at most 60000",
        ),
    ],
)
def test_columns_that_cannot_be_are_named_with_what_to_do(
    tmp_path: Path, row: dict[str, Any], says: str
) -> None:
    report, _ = check(tmp_path, lines(*[row] * 4))
    assert [issue.key for issue in report.issues] == ["file"]
    assert says in report.issues[0].message


def test_the_longest_names_of_columns_are_allowed(tmp_path: Path) -> None:
    names = [f"{n:03}{'x' * 97}" for n in range(256)]
    row = {"user_prompt": "a", "label": "b", **dict.fromkeys(names[2:], 1)}
    report, _ = check(tmp_path, lines(*[row] * 4))
    assert report.issues == []


def test_only_the_first_twenty_problems_are_listed(tmp_path: Path) -> None:
    report, _ = check(tmp_path, lines(*good(), *({"user_prompt": "a"} for _ in range(30))))
    assert len(report.issues) == 20
    assert [issue.key for issue in report.issues][-1] == "line 24, column ground_truth"


def test_a_problem_names_its_line_and_column_and_quotes_its_row(tmp_path: Path) -> None:
    row = {"question": 7, "ground_truth": "<b>" * 99}
    report, _ = check(tmp_path, lines(row), question="user_prompt")
    [issue] = report.issues
    assert (issue.line, issue.column) == (1, "question")
    assert issue.excerpt is not None
    assert issue.excerpt.startswith('{"question": 7, "ground_truth": "<b><b>')
    assert len(issue.excerpt) == MAX_EXCERPT
    assert issue.for_text().message.endswith(f"; the row begins with {issue.excerpt}")


def test_lines_that_cannot_be_read_do_not_hide_what_comes_after_them(tmp_path: Path) -> None:
    broken = [
        b"not json",
        b'{"user_prompt": "\xff"}',
        b"x" * (8 * MAX_ROW_BYTES),
        b"[" * 100_000,
        b"[1]",
        b'{"user_prompt": "q"}',
    ]
    content = b"\n".join([*broken[:2], lines(*good(1)).strip().encode(), *broken[2:]])
    report, rows = check(tmp_path, content)
    assert [issue.line for issue in report.issues] == [1, 2, 4, 5, 6, 7]
    assert [issue.column for issue in report.issues] == [None] * 5 + ["ground_truth"]
    assert [issue.excerpt for issue in report.issues][:2] == [
        "not json",
        '{"user_prompt": "\ufffd"}',
    ]
    assert len(rows) == 1


def test_csv_ends_with_a_line_that_cannot_be_read_and_not_with_one_of_other_length(
    tmp_path: Path,
) -> None:
    content = b"user_prompt,label\na\nb\n\xff,c\nd\n"
    report, _ = check(tmp_path, content, "csv")
    assert [issue.line for issue in report.issues] == [2, 3, 4]
    assert [issue.excerpt for issue in report.issues] == ['["a"]', '["b"]', "\ufffd,c"]


@given(columns=st.dictionaries(st.text(), st.text() | st.integers(), max_size=3), text=st.text())
def test_stored_problems_are_bounded_and_read_back(columns: dict[str, object], text: str) -> None:
    issues = [line_issue(2, text, text), file_issue(text, text)]
    issues.append(RowIssue("x", text, line=1, column=text, excerpt=excerpt_of(columns)))
    stored = to_text(issues)
    assert "\0" not in stored
    assert from_text(stored) == issues
    key, message, cut = "\0" * MAX_KEY, "\0" * MAX_MESSAGE, "\0" * MAX_EXCERPT
    many = to_text([RowIssue(key, message, line=10**9, column=key, excerpt=cut)] * 100)
    assert len(many) < 160_000
    assert len(from_text(many)) == SHOWN_ISSUES
    assert from_text('{"of": "another version"}') == from_text(None) == []


def test_text_must_be_utf8(tmp_path: Path) -> None:
    report, _ = check(tmp_path, lines(*good()).encode() + b'{"user_prompt": "\xff"}\n')
    assert report.issues[0].key == "line 5"
    assert "UTF-8 at byte 18" in report.issues[0].message


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_row_may_not_be_huge(tmp_path: Path, kind: str) -> None:
    head = lines(*good()) if kind == "jsonl" else "user_prompt,label\na,b\n"
    report, _ = check(tmp_path, head + '"' + "x" * MAX_ROW_BYTES + '"\n', kind)
    assert "must have at most" in report.issues[0].message


def gsm8k(count: int = 4) -> str:
    """Rows in the shape of a public dataset."""
    return lines(*({"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(count)))


def test_a_public_dataset_is_read_as_it_is_with_a_mapping(tmp_path: Path) -> None:
    refused, _ = check(tmp_path, gsm8k())
    assert "missing required columns" in refused.issues[0].message
    report, rows = check(tmp_path, gsm8k(), question="user_prompt", answer="ground_truth")
    assert report.issues == []
    assert report.columns == ("user_prompt", "ground_truth")
    assert rows[2].prompt[0].content == "2 + 1?"
    assert rows[2].label == "#### 3"
    swapped = lines(*({"user_prompt": "a", "ground_truth": f"q{n}"} for n in range(4)))
    report, rows = check(tmp_path, swapped, user_prompt="ground_truth", ground_truth="user_prompt")
    assert (rows[1].prompt[0].content, rows[1].label) == ("q1", "a")


def test_a_mapping_that_does_not_fit_is_named(tmp_path: Path) -> None:
    missing, _ = check(tmp_path, gsm8k(), queston="user_prompt")
    assert missing.issues[0].key == "file"
    assert "has no column queston to map to user_prompt; it has: question, answer" in (
        missing.issues[0].message
    )
    neither, _ = check(tmp_path, gsm8k(), q="user_prompt", a="ground_truth")
    assert [issue.message for issue in neither.issues] == [
        "has no column q to map to user_prompt and no a to map to ground_truth; it has: question, answer"
    ]
    both = lines(*({"question": "q", "user_prompt": "p", "ground_truth": "a"} for _ in range(4)))
    twice, _ = check(tmp_path, both, question="user_prompt")
    assert "already has a column user_prompt" in twice.issues[0].message


def test_a_problem_is_named_by_the_column_of_the_file(tmp_path: Path) -> None:
    content = lines({"question": 5, "ground_truth": "a"})
    report, _ = check(tmp_path, content, question="user_prompt")
    assert report.issues[0].key == "line 1, column question (mapped to user_prompt)"


def test_columns_that_nothing_reads_are_known() -> None:
    assert unread(("user_prompt", "ground_truth", "difficulty", "source")) == [
        "difficulty",
        "source",
    ]
    assert unread(("user_prompt", "label")) == []
    assert unread(("user_prompt", "ground_truth", "label", "metadata")) == ["label"]


def test_the_characters_of_prompts_and_labels_are_counted(tmp_path: Path) -> None:
    content = lines(*({"user_prompt": "ab€", "ground_truth": "z", "note": "?"} for _ in range(4)))
    report, _ = check(tmp_path, content)
    assert report.characters == "abz€"
    many = lines(*({"user_prompt": chr(0x4E00 + n), "ground_truth": "a"} for n in range(600)))
    assert len(check(tmp_path, many)[0].characters) == 512


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"q": "question"}, "which nothing reads"),
        ({"q": "user_prompt", "p": "user_prompt"}, "maps two columns to user_prompt"),
        ({"q": 1}, "must be an object of names"),
        ([], "must be an object of names"),
        ({"": "user_prompt"}, "an empty name"),
    ],
)
def test_a_mapping_must_make_sense(said: object, says: str) -> None:
    with pytest.raises(InvalidConfig, match=says):
        mapping_of(said)


def test_a_mapping_travels_in_a_path() -> None:
    mapping = {"a question & more": "user_prompt"}
    query = as_query(mapping)
    assert from_query(httpx.URL(f"/x{query}").params["mapping"]) == mapping
    assert as_query({}) == ""
    assert from_query(None) == {}
    with pytest.raises(InvalidConfig, match="must be a JSON object"):
        from_query("{")


def sharegpt(*said: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": one, "value": text} for one, text in said], **more}


def test_conversations_in_the_form_of_sharegpt_are_converted(tmp_path: Path) -> None:
    call = json.dumps({"name": "add", "arguments": {"a": 1}})
    said = [("system", "s"), ("human", "1?"), ("function_call", call)]
    said += [("observation", "3"), ("gpt", "three")]
    text = "\n".join(json.dumps(sharegpt(*said)) for _ in range(4))
    path = tmp_path / "shared.jsonl"
    path.write_text(text)
    written: list[bytes] = []
    report = check_file(path, "jsonl", written.append, mapping={"conversations": "messages"})
    assert report.issues == []
    row = DatasetRow.model_validate_json(written[0])
    assert [m.role for m in row.prompt] == ["system", "user", "assistant", "tool"]
    assert row.prompt[2].tool_calls[0].arguments == '{"a": 1}'
    assert row.label == "three"
    [issue] = check_file(path, "jsonl", written.append).issues
    assert "--map conversations=messages" in issue.message


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (("robot", "x"), "needs `from` as one of"),
        (("human", 5), "needs `from` as one of"),
        (([], "x"), "needs `from` as one of"),
        (("function_call", "no json"), "whose value is not JSON"),
        (("function_call", "[1]"), "must have function.name"),
    ],
)
def test_a_wrong_message_in_the_form_of_sharegpt_is_named(
    tmp_path: Path, said: Any, says: str
) -> None:
    path = tmp_path / "shared.jsonl"
    path.write_text("\n".join(json.dumps(sharegpt(said, ("gpt", "a"))) for _ in range(4)))
    issues = check_file(path, "jsonl", lambda _: None, mapping={"conversations": "messages"}).issues
    assert says in issues[0].message
