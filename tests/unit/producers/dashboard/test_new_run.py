"""The form of a new run: fields become a TOML and back, and errors stand beside their fields."""

import html
import tomllib

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.dashboard.config_form import (
    field_names,
    lost_keys,
    read_toml,
    rubric_field,
    write_toml,
)
from schemas.toml.parser import parse_run
from tests.kit.application import Application
from tests.kit.showcase import fill
from tests.kit.signed_in import form_key_in
from tests.kit.tenants import tenant

FILLED = {
    "experiment.rollout": "math",
    "experiment.entrypoint": "main.py",
    "experiment.model_path": 'a "quoted" name',
    "experiment.dataset": "gsm8k",
    "training.lr": "5e-6",
    "training.rollout_batch_size": "16",
    "advanced.deterministic": "true",
    "advanced.algorithm": "gspo",
    "advanced.rewards": "exact = 1.0\nformat = 0.25",
    rubric_field(0, "text"): "Is it clear?",
    rubric_field(0, "model"): "openai/judge",
    rubric_field(0, "weight"): "2",
}


def test_the_fields_become_a_config_and_come_back() -> None:
    config = tomllib.loads(write_toml(FILLED))
    made = parse_run(config)
    assert (made.training.lr, made.advanced.deterministic) == (5e-6, True)
    assert [(one.name, one.weight) for one in made.advanced.rewards] == [
        ("exact", 1.0),
        ("format", 0.25),
    ]
    assert made.advanced.rubrics[0].text == "Is it clear?"
    assert made.advanced.rubrics[0].weight == 2
    again = read_toml(config)
    assert tomllib.loads(write_toml(again)) == config
    assert {key: again[key] for key in FILLED if key != "training.lr"} == {
        key: value for key, value in FILLED.items() if key != "training.lr"
    }


@pytest.mark.parametrize("key", ["curriculum", "failed_reward", "failed_rewards", "lora_targets"])
def test_a_key_that_one_field_cannot_hold_is_left_to_the_text(key: str) -> None:
    assert f"advanced.{key}" not in field_names()


KEPT = """
# about this run
[experiment]
rollout = "math"
entrypoint = "main.py"
[training]
lr = 5e-6
[advanced]
algorithm = "grpo"
lora_targets = ["q_proj"]
rewards = [{ name = "exact", weight = 0.5 }]
[[advanced.rubrics]]
text = '''Is it clear?
Is it short?'''
model = "openai/judge"
weight = 1.0
scale = [0.0, 10.0]
[env]
LEVEL = "2"
[future]
key = [1, 2]
"""


def test_keys_without_a_field_are_kept_in_the_config() -> None:
    config = tomllib.loads(KEPT)
    fields = read_toml(config)
    fields[rubric_field(0, "text")] = fields[rubric_field(0, "text")].replace("\n", "\r\n")
    changed = tomllib.loads(write_toml({**fields, "training.lr": "1e-6"}, config))
    assert changed == {**config, "training": {"lr": 1e-6}}
    assert lost_keys(config, changed) == []
    emptied = tomllib.loads(write_toml({**fields, "training.lr": ""}, config))
    assert lost_keys(config, emptied) == ["training"]
    no_rubric = tomllib.loads(write_toml({**fields, rubric_field(0, "text"): ""}, config))
    assert lost_keys(config, no_rubric) == ["advanced.rubrics"]


@pytest.mark.parametrize(
    "value",
    ["model_path = ['a']", "model_path = ' a'", "model_path = 'a\\u000a'", "dataset = 2020-01-01"],
)
def test_a_value_that_no_field_can_show_stays_in_the_config(value: str) -> None:
    config = tomllib.loads(f"[experiment]\n{value}\n".replace("'", '"'))
    assert tomllib.loads(write_toml(read_toml(config), config)) == config


@pytest.mark.parametrize(
    "value",
    [
        'rewards = ["exact"]',
        'rewards = [{ name = "a=b" }]',
        'rewards = [{ name = "a", weight = nan }]',
        'rewards = [{ name = "a", kind = 1 }]',
        'rubrics = [{ name = "a" }]',
        'rubrics = [{ text = "a", weight = inf }]',
        'rubrics = ["a"]',
    ],
)
def test_lists_that_no_field_can_show_stay_in_the_config(value: str) -> None:
    config = tomllib.loads(f"[advanced]\n{value}\n")
    assert str(tomllib.loads(write_toml(read_toml(config), config))) == str(config)


def test_rubrics_beyond_the_fields_stay_in_the_config() -> None:
    rubrics = [{"text": str(n), "weight": 2.0} for n in range(5)]
    config = {"advanced": {"rubrics": rubrics}}
    fields = {**read_toml(config), rubric_field(1, "text"): ""}
    assert tomllib.loads(write_toml(fields, config)) == {
        "advanced": {"rubrics": [rubrics[0], *rubrics[2:]]}
    }


@given(st.dictionaries(st.sampled_from(sorted(field_names())), st.text(max_size=40)))
def test_any_text_in_any_field_makes_a_toml(fields: dict[str, str]) -> None:
    encodable = {key: value.encode("utf-8", "ignore").decode() for key, value in fields.items()}
    tomllib.loads(write_toml(encodable))


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=8,
    )
)
def test_a_config_of_any_shape_can_be_read(value: object) -> None:
    for config in ({"advanced": value}, {"training": value}, {"advanced": {"rubrics": value}}):
        assert isinstance(read_toml(config), dict)


@pytest.mark.postgres
async def test_an_error_stands_beside_its_field_and_leads_to_it(
    browser: httpx.AsyncClient,
) -> None:
    fields = {"form_key": form_key_in((await browser.get("/new")).text), "action": "check"}
    toml = write_toml({**FILLED, "training.lr": "7"})
    page = await browser.post("/new", data={**fields, **FILLED, "toml": toml})
    assert page.status_code == 400
    assert '<a href="#training.lr">' in page.text
    field = page.text.partition('id="training.lr"')[2].partition("</div>")[0]
    assert 'aria-invalid="true"' in field
    assert 'class="problem"' in field
    assert page.text.count('aria-invalid="true"') == 1
    assert 'value="gsm8k"' in page.text


@pytest.mark.postgres
async def test_the_fields_are_filled_from_a_config(
    app: Application, browser: httpx.AsyncClient
) -> None:
    await tenant(app, "first", "/repo")
    page = (await browser.get("/new")).text
    assert '<datalist id="known-experiment.dataset"><option>' in page
    fields = {"form_key": form_key_in(page), "action": "read", "name": "mine"}
    filled = (await browser.post("/new", data={**fields, "toml": write_toml(FILLED)})).text
    assert "\nIs it clear?</textarea>" in filled
    assert 'name="training.rollout_batch_size" value="16"' in filled
    assert 'value="mine"' in filled
    wrong = await browser.post("/new", data={**fields, "toml": "[x"})
    assert (wrong.status_code, "not valid TOML" in wrong.text) == (400, True)


@pytest.mark.postgres
async def test_the_page_says_what_of_a_config_its_fields_replace(
    browser: httpx.AsyncClient,
) -> None:
    page = (await browser.get("/new")).text
    assert 'name="experiment.dataset" value="my-dataset"' in page
    fields = {"form_key": form_key_in(page), "action": "write", "name": "it's mine"}
    filled = {**fields, **read_toml(tomllib.loads(KEPT)), "training.lr": "", "toml": KEPT}
    written = (await browser.post("/new", data=filled)).text
    note = written.partition("this is left out: ")[2].partition("</p>")[0]
    assert "<code>training</code>, <code>comments</code>" in note
    assert "LEVEL = &#34;2&#34;" in written
    assert "--name &#39;it&#39;&#34;&#39;&#34;&#39;s mine&#39;" in written
    wrong = await browser.post("/new", data={**filled, "toml": "[x"})
    assert (wrong.status_code, ">[x</textarea>" in wrong.text) == (400, True)
    unknown = {**fields, "action": "read", "toml": '[advanced]\nalgorithm = "new"'}
    read = (await browser.post("/new", data=unknown)).text
    assert "<option selected>new</option>" in read


@pytest.mark.postgres
async def test_the_form_begins_with_what_exists(
    app: Application, browser: httpx.AsyncClient
) -> None:
    def config(page: str) -> dict[str, str]:
        text = html.unescape(page.partition('<textarea id="toml"')[2].partition(">")[2])
        found: dict[str, str] = tomllib.loads(text.partition("</textarea>")[0])["experiment"]
        return found

    nothing = config((await browser.get("/new")).text)
    assert (nothing["dataset"], nothing["model_path"]) == ("my-dataset", "Qwen/Qwen3-0.6B")
    await fill(app, steps=2)
    page = (await browser.get("/new")).text
    assert config(page) == {
        "rollout": "math",
        "entrypoint": "main.py",
        "model_path": "Qwen/Qwen3-0.6B",
        "dataset": "gsm8k-train",
    }
    assert 'name="workspace" list="known-workspace" value="sums"' in page
