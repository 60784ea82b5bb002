"""The pages of deployments and the playground, without a process that serves."""

import json

import httpx
import pytest

from producers.dashboard.playground_form import MOST_TURNS, parse_question
from schemas.errors import InvalidConfig
from tests.kit.application import Application
from tests.kit.showcase import fill
from tests.kit.signed_in import form_key_in

HERE = "http://127.0.0.1"
FORM = {"left": "base", "right": "base:sums", "question": "Say 3"}


def test_each_side_has_its_own_answers_before_the_question() -> None:
    turns = json.dumps([{"question": "Say 2", "left": "two", "right": "2"}])
    asked = parse_question({**FORM, "turns": turns, "system": "Be short.", "seed": "7"})
    left, right = (json.loads(asked.body(side, stream=True)) for side in ("left", "right"))
    assert [one["content"] for one in left["messages"]] == ["Be short.", "Say 2", "two", "Say 3"]
    assert [one["content"] for one in right["messages"]] == ["Be short.", "Say 2", "2", "Say 3"]
    assert (left["model"], right["model"]) == ("base", "base:sums")
    assert (left["seed"], left["stream"]) == (7, True)
    assert "seed" not in json.loads(parse_question(FORM).body("left", stream=False))


def test_old_turns_are_forgotten() -> None:
    turns = [{"question": str(n)} for n in range(MOST_TURNS + 5)]
    asked = parse_question({**FORM, "turns": json.dumps(turns)})
    assert next(turn.question for turn in asked.turns) == "5"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("question", "  "),
        ("question", "x" * 100_001),
        ("temperature", "hot"),
        ("temperature", "nan"),
        ("temperature", "2.1"),
        ("max_tokens", "0"),
        ("max_tokens", "1e9"),
        ("seed", "-1"),
        ("turns", "[" * 10_000),
        ("turns", '{"question": 1}'),
    ],
)
def test_a_wrong_field_is_named(field: str, value: str) -> None:
    with pytest.raises(InvalidConfig, match=field) as refused:
        parse_question({**FORM, field: value})
    assert refused.value.issues[0].key == field


@pytest.mark.postgres
async def test_a_question_is_answered_or_the_page_says_why_not(
    app: Application, browser: httpx.AsyncClient
) -> None:
    await fill(app, steps=2)
    page = (await browser.get("/playground")).text
    assert '<option value="Qwen/Qwen3-0.6B:sums" selected>' in page
    form = {
        "form_key": form_key_in(page),
        "left": "Qwen/Qwen3-0.6B",
        "right": "nobody",
        "question": "Say <b>3</b>",
    }
    answered = await browser.post("/playground", data=form)
    assert answered.status_code == 200
    assert "Say &lt;b&gt;3&lt;/b&gt;" in answered.text
    assert "No answer: no process serves deployments now" in answered.text
    assert "No answer: there is no model &#39;nobody&#39;" in answered.text
    wrong = await browser.post("/playground", data={**form, "temperature": "9"})
    assert wrong.status_code == 400
    assert "must be a number from 0 to 2" in wrong.text
    assert "Say &lt;b&gt;3&lt;/b&gt;" in wrong.text  # the question is not lost
    streamed = await browser.post("/playground/stream", data={**form, "side": "right"})
    assert streamed.status_code == 404
    assert "there is no model" in streamed.json()["error"]["message"]
    aside = await browser.post("/playground/stream", data={**form, "side": "up"})
    assert aside.status_code == 400


@pytest.mark.postgres
async def test_a_mistake_in_a_deployment_is_shown_beside_its_form(
    app: Application, browser: httpx.AsyncClient
) -> None:
    await fill(app, steps=2)
    page = await browser.get("/deployments?checkpoint=a%22b@best")
    assert 'value="a&#34;b@best"' in page.text
    form = {"form_key": form_key_in(page.text), "checkpoint": "nobody@best", "name": "x"}
    wrong = await browser.post("/deployments", data=form)
    assert wrong.status_code == 404
    assert "nobody" in wrong.text
    assert 'role="alert"' in wrong.text
    ended = await browser.post("/deployments/sums/undeploy", data=form)
    assert (ended.status_code, ended.headers["location"]) == (303, "/deployments")
    listed = (await browser.get("/deployments.json")).json()["deployments"]
    assert {one["name"] for one in listed} == {"sums", "tools"}
