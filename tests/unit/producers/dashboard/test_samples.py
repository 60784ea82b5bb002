"""The reader of samples: one group at a time, with ways to walk, find and download."""

import html
import re
from dataclasses import replace

import httpx
import pytest

from producers.core.history.sample_search import find_text
from producers.dashboard.answers import (
    share_of_text,
    text_part,
    trained_logprobs,
    whole_text,
)
from producers.dashboard.branches import RETURNED, num_given, parse_choice, shown_branch, tabs
from producers.dashboard.pages.samples import EVERYTHING, GROUPS_IN_LIST, listed_groups
from schemas.artifact_refs import ArtifactRef
from schemas.errors import CorruptData, FailureCategory, InvalidConfig
from schemas.ids import REFUTED, GroupKey, Purpose
from schemas.sampling import (
    Judgement,
    Message,
    SampleFailure,
    SampleOutput,
    SampleRecord,
    Sequence,
    ToolCall,
)
from schemas.specs import DatasetRef
from tests.kit.application import Application
from tests.kit.showcase import FIRST, fill
from tests.kit.showcase_answers import QUESTIONS

HERE = "http://127.0.0.1"
RECORD = SampleRecord(
    index=0,
    messages=(
        Message(role="user", content="How many?"),
        Message(
            role="assistant",
            content="",
            tool_calls=(ToolCall(id="1", name="add", arguments='{"a": 1}'),),
        ),
    ),
    sequences=(Sequence(tokens=(1, 2, 3), loss_mask=(0, 1, 1), logprobs=(0.0, -1.0, -3.0)),),
)


def test_the_trained_tokens_are_those_that_the_policy_chose() -> None:
    assert trained_logprobs(RECORD) == [-1.0, -3.0]


def test_a_text_is_found_in_messages_and_in_calls_of_tools() -> None:
    assert find_text(RECORD, "HOW many")
    assert find_text(RECORD, '"a": 1')
    assert not find_text(RECORD, "nothing")


def test_a_text_is_found_in_what_code_printed_and_in_what_judges_wrote() -> None:
    output = SampleOutput(stdout="took 3 turns", traceback="KeyError: 'x'")
    failure = SampleFailure(category=FailureCategory.VALIDATION, message="no label")
    record = RECORD.model_copy(update={"output": output, "failure": failure})
    for words in ("TOOK 3", "keyerror", "no label"):
        assert find_text(record, words)
        assert not find_text(RECORD, words)
    judged = [
        Judgement(index=index, rubric="r", model="m", score=1.0, explanation=text)
        for index, text in ((0, "It is clear."), (1, "It is wrong."))
    ]
    assert find_text(RECORD, "is clear", judged)
    assert not find_text(RECORD, "is wrong", judged)


def test_the_whole_text_has_everything_that_was_said() -> None:
    expected = '=== user ===\nHow many?\n\n=== assistant ===\nadd {"a": 1}'
    assert whole_text(RECORD) == expected


def test_many_texts_share_what_a_page_shows() -> None:
    long = RECORD.model_copy(update={"messages": RECORD.messages * 100})
    assert share_of_text([RECORD]) > share_of_text([long] * 8) == 100


BRANCHES = tuple(
    (Message(role="user", content="Count."), Message(role="assistant", content=f"It is {number}."))
    for number in range(1, 31)
)
BRANCHED = SampleRecord(index=2, messages=BRANCHES[-1], branches=BRANCHES)


def test_only_messages_that_the_prompt_has_are_left_out() -> None:
    system, asked = Message(role="system", content="Be brief."), Message(role="user", content="1?")
    reply = Message(role="assistant", content="1")
    assert num_given((asked, reply), (asked,)) == 1
    assert num_given((system, asked, reply), (asked,)) == 0
    assert num_given((system, asked, reply), (system, reply)) == 1
    assert num_given((asked,), (asked, asked)) == 1
    assert num_given((asked, reply), ()) == 0


def test_the_chosen_branch_is_shown_and_else_the_one_that_the_grader_reads() -> None:
    assert shown_branch(BRANCHED, None) == (30, BRANCHES[-1])
    assert shown_branch(BRANCHED, parse_choice("2.4")) == (4, BRANCHES[3])
    for other in ("0.4", "2.31", "2.0"):
        assert shown_branch(BRANCHED, parse_choice(other)) == (30, BRANCHES[-1])
    returned = BRANCHED.model_copy(update={"messages": RECORD.messages})
    assert shown_branch(returned, None) == (RETURNED, RECORD.messages)
    assert tabs(returned, RETURNED)[0] == {"name": "Returned", "place": "2.0", "is_shown": True}
    for wrong in ("1", "a.b", "-1.2", "1.2.3", "9" * 10 + ".1"):
        with pytest.raises(InvalidConfig):
            parse_choice(wrong)


def test_the_tabs_of_many_branches_are_those_around_the_shown_one() -> None:
    names = [str(tab["name"]).removeprefix("Branch ") for tab in tabs(BRANCHED, 15)]
    assert names == ["1", *map(str, range(11, 20)), "30"]
    assert [tab["name"] for tab in tabs(BRANCHED, 15) if tab["is_shown"]] == ["Branch 15"]
    assert tabs(RECORD, RETURNED) == ()


def test_branches_are_found_and_downloaded() -> None:
    assert find_text(BRANCHED, "it is 7.")
    assert text_part(BRANCHED, "branch-7-message-1") == "It is 7."
    assert text_part(BRANCHED, "branch-31-message-1") is None
    assert "=== branch 7 ===\n\n=== user ===\nCount." in whole_text(BRANCHED)
    assert whole_text(BRANCHED).count("It is 30.") == 1


@pytest.fixture
def showcase_steps() -> int:
    return 3


def test_one_text_can_be_read_alone() -> None:
    assert text_part(RECORD, "message-0") == "How many?"
    assert text_part(RECORD, "message-1") == 'add {"a": 1}'
    assert text_part(RECORD, "message-2") is None


@pytest.mark.postgres
async def test_a_group_can_be_read_walked_and_downloaded(
    app: Application, browser: httpx.AsyncClient
) -> None:
    here = f"/runs/{FIRST}/samples"
    page = (await browser.get(f"{here}?step=2")).text
    assert "Next group (n)" in page
    assert 'id="sample-0"' in page
    assert " 1 turn " in page
    assert "1 turns" not in page
    assert "turn 0 <bdi>solver</bdi> 0.5" in page
    assert "agent <bdi>solver</bdi> " in page
    found = (await browser.get(f"{here}.json?step=2&order=length")).json()
    lengths = [one["completion_tokens"] for one in found["samples"]]
    assert lengths == sorted(lengths, reverse=True)
    sample = found["samples"][0]
    whole = await browser.get(f"{here}/{sample['id']}/text")
    assert whole.headers["content-type"].startswith("text/plain")
    assert whole.headers["content-disposition"].startswith("attachment")
    assert whole.headers["x-content-type-options"] == "nosniff"
    nothing = (await browser.get(f"{here}?step=2&find=no-such-text")).text
    assert "0 of" in nothing
    assert 'id="sample-' not in nothing


@pytest.mark.postgres
async def test_the_agent_s_own_system_prompt_and_all_branches_can_be_read(
    app: Application, browser: httpx.AsyncClient
) -> None:
    here = f"/runs/{FIRST}/samples"
    page = (await browser.get(f"{here}?step=2")).text
    assert "Answer as briefly as you can." in page
    assert "The answer is 137." in page
    assert "Yes, it is." not in page
    found = re.search(r'<a href="([^"]*branch=0\.2#sample-0)">Branch 2</a>', page)
    assert found is not None
    other = (await browser.get(html.unescape(found[1]).partition("#")[0])).text
    assert "Yes, it is." in other
    assert "The answer is 137." not in other
    assert "About 130." in other, "the other answers stay"
    assert (await browser.get(f"{here}?step=2&branch=x")).status_code == 400
    (sample,) = [
        one
        for one in (await browser.get(f"{here}.json?step=2")).json()["samples"]
        if one["branches"]
    ]
    assert [one[-1]["content"] for one in sample["branches"]] == [
        "The answer is 137.",
        "Yes, it is.",
    ]
    whole = (await browser.get(f"{here}/{sample['id']}/text")).text
    assert "Yes, it is." in whole


@pytest.mark.postgres
async def test_the_last_page_of_answers_may_be_empty(
    app: Application, browser: httpx.AsyncClient
) -> None:
    page = await browser.get(f"/runs/{FIRST}/samples?step=2&first=1000")
    assert page.status_code == 200


@pytest.mark.postgres
@pytest.mark.parametrize("showcase_steps", [None])
async def test_tokens_have_colours_by_class_and_an_answer_without_tokens_says_so(
    app: Application, browser: httpx.AsyncClient
) -> None:
    await fill(app, steps=3, text=lambda text: f"{text}<script>x</script>")
    here = f"/runs/{FIRST}/samples"
    page = (await browser.get(f"{here}?step=2&colour=logprob")).text
    assert '<span class="p1">' in page
    assert "No tokens of this answer are recorded" in page
    assert "<script>x" not in page
    assert "style=" not in page
    assert "colour=logprob" in page  # the links to other groups keep the colour
    plain = (await browser.get(f"{here}?step=2")).text
    assert 'class="p1"' not in plain
    found = (await browser.get(f"{here}.json?step=2&colour=trained")).json()
    tokens = [one["tokens"] for one in found["samples"] if one["tokens"]]
    assert tokens[0][0]["spans"] == [
        {"text": "About 130.<script>x</script><|end|>", "colour": "trained"}
    ]
    wrong = await browser.get(f"{here}?step=2&colour=sound")
    assert wrong.status_code == 400


@pytest.mark.postgres
async def test_a_long_list_of_groups_goes_on(app: Application, browser: httpx.AsyncClient) -> None:
    groups, _ = await app.services.readmodel.runs.groups(FIRST, "train", EVERYTHING, step=1)
    many = [replace(groups[0], slot=slot) for slot in range(2 * GROUPS_IN_LIST + 1)]
    lists = [listed_groups(many, many[slot]) for slot in (0, GROUPS_IN_LIST, 2 * GROUPS_IN_LIST)]
    assert [(one["before"], one["after"]) for one in lists] == [
        (None, "200"),
        ("0", "400"),
        ("200", None),
    ]
    shown = [one["groups"] for one in lists]
    assert sum(len(one) for one in shown if isinstance(one, list)) == len(many)
    refuted = [replace(groups[0], slot=3, replacement=n) for n in (0, REFUTED)]
    marks = listed_groups([groups[0], *refuted], None)["groups"]
    assert isinstance(marks, list)
    assert [one["refuted"] for one in marks] == [False, True, False]


@pytest.mark.postgres
async def test_a_text_of_a_sample_is_downloaded_alone(
    app: Application, browser: httpx.AsyncClient
) -> None:
    sample = f"/runs/{FIRST}/samples/{GroupKey(FIRST, Purpose.TRAIN, 2, 0)}.1/text"
    assert (await browser.get(f"{sample}?part=message-1")).text == "About 130."
    assert (await browser.get(f"{sample}?part=message-9")).status_code == 404


@pytest.mark.postgres
async def test_a_group_that_took_the_place_of_another_is_read_and_walked(
    app: Application, browser: httpx.AsyncClient
) -> None:
    """Each link leads to another group, through all of them and back."""
    copy = """insert into graded_groups select owner, purpose, step, slot, replacement + 1,
    dataset_row + 4, num_samples, artifact, grades, at, judgements, attempts from graded_groups
    where owner = $1 and step = 1 and slot = 0"""
    await app.database.durable.execute(copy, FIRST)
    here = f"/runs/{FIRST}/samples"
    page, seen = (await browser.get(f"{here}?step=1")).text, list[str]()
    assert '<option value="0.1">0.1: row 4, reward' in page
    for key in ("n", "n", "n", "p", "p", "p"):
        found = re.search(rf'<a href="([^"]*)" data-shortcut="{key}"', page)
        assert found is not None
        page = (await browser.get(html.unescape(found[1]))).text
        chosen = re.search(r'<option value="([0-9.]+)" selected>', page)
        assert chosen is not None
        seen.append(chosen[1])
    assert seen == ["0.1", "1", "0", "1", "0.1", "0"]
    again = (await browser.get(f"{here}?step=1&slot=0.1")).text
    assert "/samples.json?step=1&amp;slot=0.1&amp;" in again
    assert (await browser.get(f"{here}?step=1&slot=x")).status_code == 400


@pytest.mark.postgres
async def test_the_newest_graded_answers_are_shown_first(
    app: Application, browser: httpx.AsyncClient
) -> None:
    """Also those of a step that has not ended: of a run that failed in it, they say why."""
    await app.database.durable.execute("update runs set current_step = 1 where run = $1", FIRST)
    here = f"/runs/{FIRST}/samples"
    assert (await browser.get(f"{here}.json")).json()["step"] == 2
    assert "Next group" in (await browser.get(f"{here}?step=1&slot=1")).text
    nothing = (await browser.get(f"{here}?step=7")).text
    assert re.search(r'no graded groups. <a href="[^"]*step=2&amp;[^"]*">Step 2</a>', nothing)


@pytest.mark.postgres
@pytest.mark.parametrize("showcase_steps", [None])
async def test_answers_are_read_although_their_dataset_is_gone(
    app: Application, browser: httpx.AsyncClient
) -> None:
    await fill(app, steps=2)
    dataset = await app.services.readmodel.runs.dataset_ref(FIRST)
    path = await app.services.blobs.file(DatasetRef.model_validate_json(dataset or "").content.uri)
    assert path is not None
    path.unlink()
    page = await browser.get(f"/runs/{FIRST}/samples?step=2")
    assert page.status_code == 200
    assert "The row cannot be read now: no file at" in page.text
    assert "The answer is 137." in page.text
    assert QUESTIONS[0] in html.unescape(
        page.text
    )  # each answer has the messages that it began with
    found = (await browser.get(f"/runs/{FIRST}/samples.json?step=2")).json()
    assert found["row_problem"].startswith("The row cannot be read now")
    answer = await app.api.get(f"/api/v1/runs/{FIRST}/samples")
    assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND")


@pytest.mark.postgres
async def test_a_damaged_answer_is_a_page_that_says_so(
    app: Application, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def damaged(ref: ArtifactRef) -> bytes:
        raise CorruptData(f"{ref.uri} has another SHA-256; restore it from a backup")

    monkeypatch.setattr(app.services.artifacts, "get_artifact", damaged)
    page = await browser.get(f"/runs/{FIRST}/samples?step=2")
    assert (page.status_code, page.headers["content-type"][:9]) == (500, "text/html")
    assert "another SHA-256; restore it from a backup" in page.text
