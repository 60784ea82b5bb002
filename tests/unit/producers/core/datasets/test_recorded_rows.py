"""The rows that are made of recorded groups: which samples become one, and what is in them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.blobs.dataset_cache import UnparsedRows, rows_of
from producers.core.datasets.recorded_rows import RecordedGroup, RowFilter, RowMaker
from producers.core.datasets.rules import FileReport, check_file
from schemas.datasets import DatasetRow
from schemas.sampling import Message, SampleBatch, ToolCall, ToolSpec
from tests.kit.recorded_groups import SECRET_LABEL, Answer, record, recorded_group

pytestmark = pytest.mark.hypothesis

SFT, PAIRS, GROUPS = RowFilter("sft"), RowFilter("preference"), RowFilter("trajectory")

TEXTS = st.sampled_from(["a", "b", "a longer answer", "  ", "\u2028 ü \\ ] }\0\r\n", "</s>"])
REWARDS = st.none() | st.sampled_from([-1.0, 0.0, 0.25, 1.0, 1e6, -1e6]) | st.floats(-9, 9)
ANSWERS = st.lists(st.tuples(TEXTS, REWARDS), max_size=6)
LOGS = st.lists(ANSWERS, max_size=6)


def groups_of(log: Sequence[Sequence[Answer]]) -> list[RecordedGroup]:
    """Groups of one step; every second one answers the same question."""
    return [
        recorded_group(answers, group=f"r1-train-1-{slot}-0", question=f"Say {slot % 2}")
        for slot, answers in enumerate(log)
    ]


def made(groups: Sequence[RecordedGroup], wanted: RowFilter) -> tuple[list[bytes], RowMaker]:
    maker = RowMaker(wanted)
    return [line for group in groups for line in maker.lines_of(group)], maker


def parsed(lines: Sequence[bytes]) -> list[Any]:
    return [json.loads(line) for line in lines]


def checked(lines: Sequence[bytes], path: Path) -> tuple[FileReport, list[DatasetRow]]:
    """The report of the check that every upload passes, and the rows that a run reads."""
    path.write_bytes(b"".join(lines))
    found: list[bytes] = []
    report = check_file(path, "jsonl", found.append)
    return report, [DatasetRow.model_validate_json(line) for line in found]


GROUP = recorded_group([("good", 1.0), ("bad", 0.0), ("gone", None), ("fair", 0.5)])


def test_an_answer_becomes_a_demonstration_and_a_failed_sample_is_counted() -> None:
    lines, maker = made([GROUP], SFT)
    assert [row["messages"][-1]["content"] for row in parsed(lines)] == ["good", "bad", "fair"]
    assert parsed(lines)[0]["metadata"] == {"sample": "r1-train-1-0-0.0", "reward": 1.0}
    assert maker.samples_left_out == {"failed": 1}
    assert (maker.num_samples, maker.num_rows, maker.highest) == (4, 3, 1.0)


@pytest.mark.parametrize(
    ("wanted", "kept"),
    [
        (replace(SFT, min_reward=0.5), ["good", "fair"]),
        (replace(SFT, max_reward=0.5), ["bad", "fair"]),
        (replace(SFT, best_of_group=True), ["good"]),
        (replace(SFT, limit=2), ["good", "bad"]),
    ],
)
def test_a_filter_keeps_the_samples_that_it_names(wanted: RowFilter, kept: list[str]) -> None:
    lines, maker = made([GROUP], wanted)
    assert [row["messages"][-1]["content"] for row in parsed(lines)] == kept
    assert maker.num_rows == len(kept)


def test_the_best_and_the_worst_answer_become_a_pair() -> None:
    lines, _ = made([GROUP], PAIRS)
    [row] = parsed(lines)
    assert (row["chosen"], row["rejected"], row["margin"]) == ("good", "bad", 1.0)
    assert row["prompt"] == [{"role": "user", "content": "Say 3"}]


def test_of_equal_rewards_the_first_sample_is_chosen() -> None:
    tied = recorded_group([("a", 0.0), ("b", 1.0), ("c", 1.0), ("d", 0.0)])
    [row] = parsed(made([tied], PAIRS)[0])
    assert (row["chosen"], row["rejected"]) == ("b", "a")
    best = parsed(made([tied], replace(SFT, best_of_group=True))[0])
    assert best[0]["messages"][-1]["content"] == "b"


def test_a_pair_answers_one_prompt() -> None:
    """The answers of a conversation of several turns may follow different turns."""
    other = record(1, "bad", question="Say 4")
    group = replace(
        GROUP, batch=GROUP.batch.model_copy(update={"samples": (GROUP.batch.samples[0], other)})
    )
    lines, maker = made([group], PAIRS)
    assert not lines
    assert maker.groups_left_out == {"no_pair": 1}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"truncated": True}, "truncated"),
        ({"messages": ()}, "no_answer"),
        (
            {"messages": (Message(role="user", content="a"), Message(role="user", content="b"))},
            "no_answer",
        ),
        (
            {
                "messages": (
                    Message(role="user", content="a"),
                    Message(
                        role="assistant",
                        content="b",
                        tool_calls=(ToolCall(id="1", name="f", arguments="{}"),),
                    ),
                )
            },
            "no_answer",
        ),
        (
            {
                "messages": (
                    Message(role="user", content="a"),
                    Message(role="assistant", content="b", reasoning="hm"),
                )
            },
            "reasoning",
        ),
        ({"messages": record(0, "x" * (1 << 20)).messages}, "too_long"),
        ({"tools": tuple(ToolSpec(name=f"f{n}") for n in range(129))}, "unfit"),
    ],
)
def test_a_sample_that_teaches_no_whole_answer_is_left_out(
    changes: dict[str, Any], why: str
) -> None:
    only = record(0, "b", **changes)
    batch = GROUP.batch.model_copy(update={"samples": (only,)})
    lines, maker = made([replace(GROUP, batch=batch)], SFT)
    assert not lines
    assert maker.samples_left_out == {why: 1}


def test_a_conversation_with_tools_keeps_its_calls_and_its_tools(tmp_path: Path) -> None:
    call = ToolCall(id="1", name="add", arguments='{"a": 1}')
    said = (
        Message(role="user", content="add"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="2", tool_call_id="1"),
        Message(role="assistant", content="It is 2."),
    )
    tools = (ToolSpec(name="add", description="adds", parameters='{"type": "object"}'),)
    group = replace(
        GROUP,
        batch=SampleBatch(group="g", samples=(record(0, "It is 2.", messages=said, tools=tools),)),
    )
    report, rows = checked(made([group] * 4, SFT)[0], tmp_path / "rows")
    assert not report.issues
    assert rows[0].prompt == said[:3]
    assert (rows[0].label, rows[0].tools) == ("It is 2.", tools)


def test_a_recorded_group_keeps_tokens_logprobs_and_rewards() -> None:
    [line] = made([GROUP], GROUPS)[0]
    trajectory = DatasetRow.model_validate_json(line).trajectory
    assert trajectory is not None
    assert [one.sequences for one in trajectory.samples] == [
        one.sequences for one in GROUP.batch.samples
    ]
    assert trajectory.rewards == (1.0, 0.0, None, 0.5)
    assert trajectory.samples[2].failure is not None


@pytest.mark.parametrize("wanted", [SFT, PAIRS, GROUPS])
def test_no_row_has_what_user_code_printed_or_said_of_a_failure(wanted: RowFilter) -> None:
    assert SECRET_LABEL in GROUP.batch.model_dump_json()
    lines, _ = made([GROUP], wanted)
    assert lines
    assert SECRET_LABEL not in b"".join(lines).decode()


def test_a_group_without_two_rewards_or_without_tokens_is_no_trajectory() -> None:
    single = recorded_group([("a", 1.0), ("b", None)])
    provided = replace(
        GROUP,
        batch=GROUP.batch.model_copy(
            update={
                "samples": tuple(
                    one.model_copy(update={"sequences": ()}) for one in GROUP.batch.samples
                )
            }
        ),
    )
    lines, maker = made([single, provided], GROUPS)
    assert not lines
    assert maker.groups_left_out == {"few_rewards": 1, "no_tokens": 1}


def test_recorded_rows_stay_unparsed_and_others_do_not() -> None:
    line = made([GROUP], GROUPS)[0][0]
    kept = rows_of(line * 3)
    assert isinstance(kept, UnparsedRows)
    assert len(kept) == 3
    assert kept[2] == kept[0] == DatasetRow.model_validate_json(line)
    assert kept[1:] == (kept[0], kept[0])
    assert rows_of(DatasetRow(prompt=(), label="3").to_line())[0].label == "3"
    assert not rows_of(b"")


@given(LOGS, st.floats(0, 2))
def test_a_pair_is_always_strictly_ordered(log: list[list[Answer]], margin: float) -> None:
    groups = groups_of(log)
    lines, _ = made(groups, replace(PAIRS, reward_margin=margin))
    rewards = {
        f"{group.group}.{grade.index}": grade.reward for group in groups for grade in group.grades
    }
    for row in parsed(lines):
        chosen, rejected = (rewards[row["metadata"][name]] for name in ("chosen", "rejected"))
        assert chosen is not None
        assert rejected is not None
        assert chosen > rejected
        assert chosen - rejected >= margin
        assert 0 < row["margin"] <= 1e6


@given(LOGS, st.sampled_from([SFT, PAIRS, GROUPS]), st.booleans())
def test_the_same_log_gives_the_same_rows_each_sample_in_one_place(
    log: list[list[Answer]], wanted: RowFilter, dedupe: bool
) -> None:
    wanted = replace(wanted, dedupe=dedupe)
    lines, maker = made(groups_of(log), wanted)
    again, _ = made(groups_of(log), wanted)
    assert lines == again
    if wanted.kind == "sft":
        assert maker.num_rows + maker.samples_left_out.total() == maker.num_samples
    else:
        assert maker.num_rows + maker.groups_left_out.total() == maker.num_groups


@given(LOGS, st.sampled_from([SFT, PAIRS, GROUPS]))
def test_a_log_behind_itself_adds_no_row_without_repetitions(
    log: list[list[Answer]], wanted: RowFilter
) -> None:
    once, _ = made(groups_of(log), replace(wanted, dedupe=True))
    twice, maker = made([*groups_of(log), *groups_of(log)], replace(wanted, dedupe=True))
    assert twice == once
    repeated, _ = made([*groups_of(log), *groups_of(log)], wanted)
    assert len(repeated) >= 2 * len(once)
    lost = maker.samples_left_out + maker.groups_left_out
    assert lost["duplicate"] == len(repeated) - len(once)


@given(LOGS)
def test_all_rows_pass_the_check_of_uploads(
    log: list[list[Answer]],
) -> None:
    for wanted in (SFT, PAIRS):
        lines, maker = made(groups_of(log), wanted)
        with TemporaryDirectory() as directory:
            report, rows = checked(lines, Path(directory) / "rows")
        few = [issue for issue in report.issues if "at least 4" in issue.for_text().message]
        assert list(report.issues) == few
        assert len(rows) == maker.num_rows
        for row in rows:
            assert row.label is not None or (row.chosen and row.rejected and row.margin)
