"""Real errors of the real code: each says what is wrong, with the value, and what to do."""

import asyncio
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request

from infra.settings.settings import BadSetting, Settings
from producers.cli.config_files import read_config
from producers.core.datasets.mapping import mapping_of
from producers.core.datasets.registration import check_name, file_kind
from producers.core.datasets.rules import check_file
from producers.core.models.model_facts import ModelFacts
from producers.core.models.model_ref import resolve_model
from producers.core.validation.references import References
from producers.core.validation.rollout_issues import SyncedCommit
from producers.core.validation.validate import validate
from producers.http.requests import JsonBody, idempotency_key
from producers.http.responses import number
from producers.http.routes.events import parse_cursor
from schemas.errors import Issue, Refused
from schemas.events import DatasetRegistered
from schemas.models.scratch import scratch_shape
from schemas.specs import DatasetRef
from schemas.toml.parser import parse_run
from tests.kit.specs import MODEL, ref
from tests.kit.tomls import eval_issues, run_issues

REMEDY = re.compile(
    r"`[^`]+`"
    r"|\bmust\b"
    r"|\b(one of|it has|did you mean|the sections are|it may hold|this request has)\b"
    r"|\b(add|choose|commit|convert|correct|give|keep|leave|map|move|name|put|rename|send|set|split"
    r"|use|write)\b"
)
"""A command, a bound, a list of what is allowed, or a verb in the imperative."""

EXPERIMENT = {"rollout": "say", "entrypoint": "main.py", "model_path": "m", "dataset": "sums"}
SHA = "ab" * 20


def toml(**sections: Any) -> dict[str, Any]:
    return {**sections, "experiment": {**EXPERIMENT, **sections.get("experiment", {})}}


TOMLS: tuple[tuple[dict[str, Any], str], ...] = (
    (toml(training={"lr": -1}), "-1"),
    (toml(training={"lr": "fast"}), "fast"),
    (toml(training={"lr": float("nan")}), "nan"),
    (toml(training={"total_epochs": 1.5}), "1.5"),
    (toml(training={"learning_rote": 1}), "learning_rote"),
    (toml(training={"zzz": 1}), "training.zzz"),
    (toml(zzz={"lr": 1}), "zzz"),
    (toml(training=3), "3"),
    ({}, "experiment"),
    ({"experiment": {"model_path": "m"}}, "experiment.dataset"),
    (toml(advanced={"algorithm": "grp"}), "grp"),
    (toml(advanced={"gae_lambda": 0.9}), "gae_lambda"),
    (toml(advanced={"clip_delta": 1.1}), "1.1"),
    (toml(advanced={"overlong_buffer": 9000}), "9000"),
    (toml(advanced={"max_steps_off_policy": 3}), "3"),
    (toml(advanced={"tuning": "full", "lora_rank": 8}), "lora_rank"),
    (toml(advanced={"correction_high": 2.0}), "correction_high"),
    (toml(advanced={"validation_samples": 4}), "validation_samples"),
    (toml(sampling={"rollout_top_p": 0.5}), "0.5"),
    (toml(training={"n_samples_per_prompt": 1000}), "1000"),
    (toml(training={"rollout_batch_size": 900_000}), "900000"),
    (toml(experiment={"entrypoint": "../main.py"}), "../main.py"),
    (toml(experiment={"rollout": "Bad Name"}), "Bad Name"),
    (toml(experiment={"branch": "main", "commit_sha": SHA}), "commit_sha"),
    (toml(env={"LD_PRELOAD": "x"}), "LD_PRELOAD"),
    (toml(env={"lower": "x"}), "lower"),
    (toml(secrets={"required": ["LD_KEY"]}), "LD_KEY"),
)


def of_toml(data: dict[str, Any]) -> Callable[[], str]:
    return lambda: say(run_issues(data))


def say(issues: tuple[Issue, ...]) -> str:
    """The first issue, as a user reads it."""
    issue = issues[0]
    meant = f"; did you mean {issue.did_you_mean}?" if issue.did_you_mean else ""
    return f"{issue.key}: {issue.message}{meant}"


def dataset(*columns: str, num_rows: int = 8) -> DatasetRegistered:
    return DatasetRegistered(
        dataset=DatasetRef(dataset="d", name="sums", content=ref("rows"), num_rows=num_rows),
        columns=columns or ("user_prompt", "ground_truth"),
        file_name="sums.jsonl",
        file_size=1,
        original=ref("rows"),
    )


def of_door(data: dict[str, Any], **found: Any) -> Callable[[], str]:
    references = References(**{"dataset": dataset(), "model": MODEL, **found})
    return lambda: say(validate(parse_run(data), references))


def of_file(name: str, content: str) -> Callable[[Path], str]:
    def report(directory: Path) -> str:
        path = directory / name
        path.write_text(content)
        return say(tuple(check_file(path, file_kind(name), lambda _: None).issues))

    return report


def of_settings(**environ: str) -> Callable[[], str]:
    def load() -> str:
        Settings.load({"HOME": "/root", **environ})
        raise AssertionError("the settings are good")

    return load


def request(query: str = "", headers: Mapping[str, str] | None = None) -> Request:
    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return Request({"type": "http", "query_string": query.encode(), "headers": raw})


SMALL = {"rollout_batch_size": 2}
SFT = {"experiment": {"model_path": "m", "dataset": "sums"}, "advanced": {"algorithm": "sft"}}
CALLS: tuple[tuple[Callable[..., object], str], ...] = (
    *((of_toml(data), value) for data, value in TOMLS),
    (lambda: say(eval_issues(toml(evaluation={"n": 2000}))), "2000"),
    (of_door(toml(training={"rollout_batch_size": 9})), "9"),
    (
        of_door(
            {**SFT, "advanced": {"algorithm": "sft", "batch_size": 4}}, dataset=dataset("text")
        ),
        "text",
    ),
    (
        of_door(
            toml(training={**SMALL, "max_prompt_length": 4096}), facts=ModelFacts(context=1024)
        ),
        "4096",
    ),
    (
        of_door(
            toml(experiment={"rollout": "sya", "commit_sha": SHA}, training=SMALL),
            commits=(SyncedCommit(SHA, (), is_whole=True),),
        ),
        "sya",
    ),
    (lambda: scratch_shape("scratch:qwen9"), "scratch:qwen9"),
    (lambda: resolve("not a model"), "not a model"),
    (lambda: resolve("./model"), "./model"),
    (lambda: resolve("/nowhere"), "/nowhere"),
    (lambda: check_name("a b"), "a b"),
    (lambda: file_kind("data.xls"), "data.xls"),
    (lambda: mapping_of({"q": "question"}), "question"),
    (lambda: mapping_of({"q": "user_prompt", "p": "user_prompt"}), "user_prompt"),
    (of_file("a.jsonl", "[1]\n"), "[1]"),
    (of_file("a.csv", "user_prompt,label\na\n"), "1 cells"),
    (of_file("a.jsonl", '{"prompt": "a"}\n'), "prompt"),
    (of_file("a.jsonl", '{"user_prompt": 3, "label": "a"}\n'), "3"),
    (of_file("a.jsonl", '{"prompt": "a", "chosen": "b"}\n'), "chosen"),
    (of_file("a.jsonl", '{"prompt": "a", "completion": "b", "label": "good"}\n'), "good"),
    (lambda: JsonBody({"name": 3}).text("name"), "3"),
    (lambda: JsonBody({"dry_run": "yes"}).flag("dry_run"), "yes"),
    (lambda: JsonBody({"n": 9}).number("n", default=1, least=0, most=2), "9"),
    (lambda: idempotency_key(request(headers={"idempotency-key": "a b"})), "a b"),
    (lambda: number(request("limit=many"), "limit", default=1, least=1, most=9), "many"),
    (lambda: parse_cursor("yesterday"), "yesterday"),
    (of_settings(HEADRACE_URL="ftp://x"), "ftp://x"),
    (of_settings(HEADRACE_DATABASE_URL="mysql://x"), "mysql://x"),
    (of_settings(HEADRACE_SAMPLER="rabbit"), "rabbit"),
    (lambda: read_config(Path("/nowhere/run.toml")), "/nowhere/run.toml"),
)


def resolve(path: str) -> None:
    """Raises InvalidConfig: these paths need no lookup in the log."""
    no_lookup: Any = None
    asyncio.run(resolve_model(path, seed=0, lookup=no_lookup))


def message_of(call: Callable[..., object], directory: Path) -> str:
    """The text that a user sees: the error's message, or the issue that the call returns."""
    takes_directory = call.__code__.co_argcount == 1
    try:
        shown = call(directory) if takes_directory else call()
    except (Refused, BadSetting) as error:
        return str(error)
    return str(shown)


def test_an_error_names_the_value_and_the_remedy(tmp_path: Path) -> None:
    poor = []
    for call, value in CALLS:
        message = message_of(call, tmp_path)
        before, found, after = message.partition(value)
        if not found or not REMEDY.search(after + before) or len(message) <= len(value) + 10:
            poor.append((value, message))
    assert poor == []


def test_the_sample_is_a_good_one() -> None:
    assert len(CALLS) >= 50
