"""The requests that the commands send to a server, and how they handle its responses."""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from producers.cli.checkpoint_files import safe_name
from producers.cli.client import Client, ServerAddress
from producers.cli.errors import Failure
from producers.cli.repository import ensure_workspace, repository_around
from schemas.toml.parser import parse_run
from tests.unit.producers.cli.conftest import FakeServer, Run


def git(directory: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=directory, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A committed workspace with a GRPO config."""
    root = tmp_path / "sums"
    (root / "configs").mkdir(parents=True)
    (root / "rollouts" / "r").mkdir(parents=True)
    (root / "rollouts" / "r" / "main.py").write_text("x = 1\n")
    (root / "configs" / "grpo.toml").write_text(
        '[experiment]\nrollout = "r"\nentrypoint = "main.py"\nmodel_path = "m"\ndataset = "d"\n'
    )
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "first")
    return root


@pytest.mark.parametrize(
    ("said", "meant"),
    [(("trian", "list"), "'train'"), (("train", "sumbit", "x"), "'submit'"), (("zzz",), None)],
)
def test_a_mistyped_command_is_told_what_was_meant(
    headrace: Run, said: tuple[str, ...], meant: str | None
) -> None:
    ran = headrace(*said)
    assert ran.code == 2
    assert ran.err.count("Did you mean") == (meant is not None)
    assert meant is None or f"Did you mean {meant}?" in ran.err


def test_broken_toml_names_the_file_and_the_line(headrace: Run, repository: Path) -> None:
    broken = repository / "configs" / "broken.toml"
    broken.write_text("[experiment]\nmodel_path = \n")
    ran = headrace("train", "submit", str(broken), "--json")
    assert ran.code == 1
    assert ran.error["code"] == "VALIDATION"
    assert f"{broken} is not valid TOML" in ran.error["message"]
    assert "line 2" in ran.error["message"]


def no_workspaces(server: FakeServer) -> None:
    server.answer("GET", "/workspaces", {"workspaces": [], "has_more": False})


def test_a_write_carries_one_key_through_its_retries(server: FakeServer) -> None:
    server.drop("POST", "/runs")
    server.answer("POST", "/runs", {"code": "UNAVAILABLE"}, status=503)
    server.answer("POST", "/runs", {"run": {"id": "1"}}, status=201)
    with Client(ServerAddress(server.url, None)) as client:
        assert client.post("/runs", {"config": {}}) == {"run": {"id": "1"}}
    keys = [request.headers["Idempotency-Key"] for request in server.requests]
    assert len(keys) == 3
    assert len(set(keys)) == 1


def test_two_submits_carry_two_keys(server: FakeServer, headrace: Run, tmp_path: Path) -> None:
    config = tmp_path / "sft.toml"
    config.write_text('[experiment]\nmodel_path = "scratch:x"\ndataset = "d"\n')
    server.answer("POST", "/runs", {"run": {"id": "1", "name": "n"}}, status=201)
    assert headrace("train", "submit", str(config), "--json").document["run"]["id"] == "1"
    assert headrace("train", "submit", str(config)).code == 0
    first, second = (request.headers["Idempotency-Key"] for request in server.requests)
    assert first != second


def test_submit_sends_the_secrets_of_a_file(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    config, keys = tmp_path / "run.toml", tmp_path / "keys.env"
    config.write_text('[experiment]\nmodel_path = "scratch:x"\ndataset = "d"\n')
    server.answer("POST", "/runs", {"run": {"id": "1", "name": "n"}}, status=201)
    keys.write_text("KEY=hush-hush-1\n")
    ran = headrace("train", "submit", str(config), "--secrets-file", str(keys))
    assert ran.code == 0
    assert server.requests[-1].document["secrets"] == {"KEY": "hush-hush-1"}
    assert headrace("train", "submit", str(config)).code == 0
    assert "secrets" not in server.requests[-1].document


def test_submit_registers_the_repository_around_the_config(
    server: FakeServer, headrace: Run, repository: Path
) -> None:
    no_workspaces(server)
    server.answer("POST", "/workspaces", {"workspace": {"id": "w1"}}, status=201)
    server.answer("POST", "/runs", {"run": {"id": "1", "name": "n"}}, status=201)
    config = str(repository / "configs" / "grpo.toml")
    assert headrace("train", "submit", config, "--from", "a@3", "--name", "n").code == 0
    registered, submitted = server.requests[1], server.requests[2]
    assert registered.document == {"url": str(repository)}
    assert submitted.document["workspace"] == "w1"
    assert submitted.document["from"] == "a@3"
    assert submitted.document["name"] == "n"
    assert submitted.document["config"]["experiment"]["rollout"] == "r"


def test_an_api_key_that_may_not_add_a_workspace_is_told_to_name_one(
    server: FakeServer, headrace: Run, repository: Path
) -> None:
    no_workspaces(server)
    refusal = {"code": "FORBIDDEN", "detail": "POST /workspaces needs the scope admin"}
    server.answer("POST", "/workspaces", refusal, status=403)
    ran = headrace("train", "submit", str(repository / "configs" / "grpo.toml"), "--json")
    assert ran.error["code"] == "FORBIDDEN"
    assert "name a workspace with --workspace" in ran.error["message"]


def test_options_of_submit_replace_keys_of_the_config(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    config = tmp_path / "sft.toml"
    config.write_text(
        '[experiment]\nmodel_path = "scratch:x"\n[advanced]\npriority = 2\nseed = 3\n'
    )
    server.answer("POST", "/runs", {"run": {"id": "1", "name": "n"}}, status=201)
    options = ("--priority", "9", "--allow-divergence")
    assert headrace("train", "submit", str(config), *options).code == 0
    assert headrace("train", "submit", str(config)).code == 0
    with_options, without = (r.document["config"]["advanced"] for r in server.requests)
    assert with_options == {"priority": 9, "seed": 3, "allow_divergence": True}
    assert without == {"priority": 2, "seed": 3}


def test_options_of_submit_leave_a_broken_section_to_the_server(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    config = tmp_path / "sft.toml"
    config.write_text('advanced = 3\n[experiment]\nmodel_path = "scratch:x"\n')
    server.answer("POST", "/runs", {"code": "VALIDATION_ERROR"}, status=422)
    assert headrace("train", "submit", str(config), "--priority", "9").code == 1
    assert server.requests[0].document["config"]["advanced"] == 3


def test_submit_finds_a_repository_that_is_registered_by_its_origin(
    server: FakeServer, repository: Path
) -> None:
    git(repository, "remote", "add", "origin", "https://example.org/sums.git")
    known = {"id": "w7", "url": "https://example.org/sums.git"}
    server.answer("GET", "/workspaces", {"workspaces": [known], "has_more": False})
    with Client(ServerAddress(server.url, None)) as client:
        found = ensure_workspace(client, repository_around(repository / "configs" / "grpo.toml"))
    assert found == ("w7", "https://example.org/sums.git")


@pytest.mark.parametrize(("with_path", "chosen"), [(True, "w8"), (False, "w7")])
def test_of_a_path_and_an_origin_that_are_registered_the_path_is_meant(
    server: FakeServer, headrace: Run, repository: Path, chosen: str, *, with_path: bool
) -> None:
    """A workspace that was connected to the origin made every run of the clone take the commit that
    the remote has, in silence."""
    git(repository, "remote", "add", "origin", "https://example.org/sums.git")
    known = [{"id": "w7", "url": "https://example.org/sums.git"}]
    known += [{"id": "w8", "url": str(repository)}] if with_path else []
    server.answer("GET", "/workspaces", {"workspaces": known, "has_more": False})
    server.answer("POST", "/runs", {"run": {"id": "1", "name": "n"}}, status=201)
    ran = headrace("train", "submit", str(repository / "configs" / "grpo.toml"))
    assert server.requests[-1].document["workspace"] == chosen
    note = "is not pushed; the run takes a commit that https://example.org/sums.git has"
    assert (note in ran.out + ran.err) is not with_path


def test_uncommitted_changes_of_a_rollout_are_named(
    server: FakeServer, headrace: Run, repository: Path
) -> None:
    known = {"id": "w", "url": str(repository)}
    server.answer("GET", "/workspaces", {"workspaces": [known], "has_more": False})
    server.answer("POST", "/runs", {"run": {"id": "1", "name": "n"}}, status=201)
    (repository / "rollouts" / "r" / "main.py").write_text("x = 2\n")
    out = headrace("train", "submit", str(repository / "configs" / "grpo.toml")).out
    assert "not committed and not part of the run: rollouts/r/main.py" in out


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda p: None, "NOT_FOUND"),
        (lambda p: p.write_text("[experiment\n"), "VALIDATION"),
        (lambda p: p.write_text("[training]\nlr = 2020-01-01\n"), "VALIDATION"),
        (lambda p: p.write_text('[experiment]\nrollout = "r"\n'), "NOT_A_REPOSITORY"),
    ],
)
def test_a_config_that_cannot_be_sent_is_refused_here(
    server: FakeServer, headrace: Run, tmp_path: Path, make: object, code: str
) -> None:
    path = tmp_path / "c.toml"
    assert callable(make)
    make(path)
    ran = headrace("train", "submit", str(path), "--json")
    assert ran.code == 1
    assert ran.error["code"] == code
    assert not server.requests


def test_dry_run_shows_the_resolved_config(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    answer = {
        "config": {"training": {"lr": 0.1}},
        "total_steps": 7,
        "estimates": {"memory_bytes": 10},
        "issues": [],
    }
    server.answer("POST", "/runs", answer)
    path = tmp_path / "c.toml"
    path.write_text('[experiment]\ndataset = "d"\n')
    assert headrace("train", "submit", str(path), "--dry-run", "--json").document == {
        "schema_version": 1,
        **answer,
    }
    assert server.requests[-1].document["dry_run"] is True
    out = headrace("train", "submit", str(path), "--dry-run", "--name", "mine").out
    assert server.requests[-1].document["name"] == "mine"
    assert "lr" in out
    assert "7" in out


@pytest.mark.parametrize(
    ("algorithm", "shown", "hidden"),
    [("grpo", "kl_coef", "gae_lambda"), ("ppo", "gae_lambda", None)],
)
def test_dry_run_marks_what_differs_and_leaves_out_what_the_algorithm_does_not_read(
    server: FakeServer,
    headrace: Run,
    tmp_path: Path,
    algorithm: str,
    shown: str,
    hidden: str | None,
) -> None:
    advanced = {
        "algorithm": algorithm,
        "kl_coef": 0.5,
        "gae_lambda": 0.9,
        "seed": 0,
        "max_steps": 3,
    }
    server.answer("POST", "/runs", {"config": {"advanced": advanced}, "total_steps": 1})
    path = tmp_path / "c.toml"
    path.write_text('[experiment]\ndataset = "d"\n')
    out = headrace("train", "submit", str(path), "--dry-run").out
    lines = {key: line for line in out.splitlines() for key in advanced if f" {key} " in line}
    assert "*" in lines["max_steps"]
    assert "*" in lines[shown]
    assert "*" not in lines["seed"], "it is the default"
    assert hidden not in lines


def test_dry_run_leaves_out_what_only_another_kind_of_run_reads(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    experiment = {"rollout": "r", "entrypoint": "main.py", "model_path": "m", "dataset": "d"}
    advanced = {"batch_size": 16, "lora_rank": 16, "micro_batch_tokens": 64, "tuning": "full"}
    config = {"experiment": experiment, "advanced": advanced | {"algorithm": "grpo"}}
    server.answer("POST", "/runs", {"config": config, "total_steps": 1})
    path = tmp_path / "c.toml"
    path.write_text('[experiment]\ndataset = "d"\n')
    out = headrace("train", "submit", str(path), "--dry-run").out
    assert "micro_batch_tokens" in out
    assert " batch_size " not in out, "only sft reads it"
    assert "lora_rank" not in out, "all weights are trained"


def test_dry_run_leaves_out_what_a_run_on_pairs_does_not_read(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    """The server sends every key, and lists as JSON has them."""
    asked = {
        "experiment": {"model_path": "m", "dataset": "d"},
        "advanced": {"algorithm": "dpo"},
    }
    config = parse_run(asked).model_dump(mode="json")
    server.answer("POST", "/runs", {"config": config, "total_steps": 1})
    path = tmp_path / "c.toml"
    path.write_text('[experiment]\ndataset = "d"\n')
    out = headrace("train", "submit", str(path), "--dry-run").out
    assert " batch_size " in out
    for unread in ("n_samples_per_prompt", "rollout_batch_size", "rollout_temperature"):
        assert f" {unread} " not in out


def test_upload_streams_the_file_to_the_path_it_was_given(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    path = tmp_path / "My Rows.jsonl"
    path.write_bytes(b'{"a": 1}\n')
    made = {"dataset": {"id": "d1"}, "upload": {"path": "/api/v1/datasets/d1/content"}}
    server.answer("POST", "/datasets", made, status=201)
    server.answer("PUT", "/datasets/d1/content", {"dataset": {"name": "my-rows", "num_rows": 1}})
    ran = headrace("dataset", "upload", str(path), "--json")
    assert ran.document["dataset"]["num_rows"] == 1
    assert server.requests[0].document == {"name": "my-rows", "file_name": "My Rows.jsonl"}
    assert server.requests[1].body == b'{"a": 1}\n'


def test_validate_exits_1_with_the_problems(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("x\n")
    issue = {"key": "row 1", "message": "not JSON"}
    server.answer("POST", "/datasets/validate", {"valid": False, "issues": [issue]})
    ran = headrace("dataset", "validate", str(path), "--json")
    assert ran.code == 1
    assert ran.error["issues"][0]["message"] == "not JSON"
    assert server.requests[0].query == "file_name=rows.jsonl"
    assert headrace("dataset", "validate", str(tmp_path / "none"), "--json").code == 1


def checkpoint(server: FakeServer, content: bytes, sha256: str, name: str = "a.bin") -> None:
    file = {"name": name, "size": len(content), "sha256": sha256}
    found = {"run": "r", "step": 3, "ref": "r@3", "files": [file]}
    server.answer("GET", "/checkpoints/r@last", {"checkpoint": found})
    server.raw("GET", f"/checkpoints/r@3/files/{name}", content)


def test_a_downloaded_checkpoint_is_verified(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    content = b"weights" * 1000
    checkpoint(server, content, hashlib.sha256(content).hexdigest(), name="base/a.bin")
    target = tmp_path / "out"
    assert headrace("checkpoint", "download", "r@last", str(target), "--json").code == 0
    assert (target / "base" / "a.bin").read_bytes() == content
    assert headrace("checkpoint", "download", "r@last", str(target), "--json").code == 1


def test_a_checkpoint_is_downloaded_to_a_directory_of_its_name(
    server: FakeServer, headrace: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(server, b"weights", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.chdir(tmp_path)
    assert "saved r@3 in r-3;" in headrace("checkpoint", "download", "r@last").out
    assert (tmp_path / "r-3" / "a.bin").read_bytes() == b"weights"


def test_a_damaged_file_is_refused_and_does_not_stay(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    checkpoint(server, b"damaged", "0" * 64)
    ran = headrace("checkpoint", "download", "r@last", str(tmp_path / "out"), "--json")
    assert ran.error["code"] == "CORRUPT"
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("name", ["../x", "/etc/x", "", "a/../../b", "a\\b"])
def test_a_file_name_that_leads_out_is_refused(name: str) -> None:
    with pytest.raises(Failure):
        safe_name(name)


def test_chat_asks_once_with_a_message(server: FakeServer, headrace: Run) -> None:
    answer = {"message": {"role": "assistant", "content": "85"}, "usage": {}}
    server.answer("POST", "/checkpoints/r@last/chat", answer)
    assert headrace("checkpoint", "chat", "r@last", "--message", "47+38?").out == "85\n"
    sent = server.requests[0].document
    assert sent["messages"] == [{"role": "user", "content": "47+38?"}]
    assert headrace("checkpoint", "chat", "r@last", "--json").code == 2


def test_events_are_one_cloud_event_a_line_over_all_pages(
    server: FakeServer, headrace: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.cli.commands.events.PAGE", 2)
    events = [{"type": f"t{n}", "time": "2030-01-01T00:00:00+00:00", "data": {}} for n in range(3)]
    server.answer("GET", "/runs/r/events", {"events": events[:2], "next": "c2"})
    server.answer("GET", "/runs/r/events", {"events": events[2:], "next": "c3"})
    lines = headrace("events", "r", "--json").out.splitlines()
    assert [json.loads(line) for line in lines] == events
    assert "after=c2" in server.requests[1].query


def test_eval_download_writes_every_sample(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    server.answer("GET", "/evals/e", {"eval": {"name": "e"}})
    page = {"samples": [{"id": 1}], "has_more": True, "next_offset": 1}
    server.answer("GET", "/evals/e/samples", page)
    server.answer("GET", "/evals/e/samples", {"samples": [{"id": 2}], "has_more": False})
    target = tmp_path / "e.jsonl"
    assert headrace("eval", "download", "e", str(target), "--json").document["num_samples"] == 2
    assert [json.loads(line)["id"] for line in target.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize(("status", "so_far"), [("running", True), ("finished", False)])
def test_a_download_of_an_evaluation_that_goes_on_says_so(
    server: FakeServer, headrace: Run, tmp_path: Path, status: str, so_far: bool
) -> None:
    server.answer("GET", "/evals/e", {"eval": {"name": "e", "status": status}})
    server.answer("GET", "/evals/e/samples", {"samples": [], "has_more": False})
    ran = headrace("eval", "download", "e", str(tmp_path / "e.jsonl"))
    assert ran.code == 0
    assert ("those so far: e is running; download it again" in ran.out) is so_far


def test_eval_download_writes_a_directory_and_overwrites_nothing(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    server.answer("GET", "/evals/e", {"eval": {"name": "e", "metrics": {"eval/pass@1": 0.5}}})
    server.answer("GET", "/evals/e/rows", {"rows": [{"row": 0}], "has_more": False})
    server.answer("GET", "/evals/e/samples", {"samples": [{"id": 1}], "has_more": False})
    target = tmp_path / "results"
    ran = headrace("eval", "download", "e", "-o", str(target), "--json")
    assert (ran.document["num_rows"], ran.document["num_samples"]) == (1, 1)
    metrics = json.loads((target / "metrics.json").read_text())
    assert metrics["metrics"] == {"eval/pass@1": 0.5}
    assert json.loads((target / "summary.jsonl").read_text()) == {"row": 0}
    assert json.loads((target / "samples.jsonl").read_text()) == {"id": 1}
    refused = headrace("eval", "download", "e", "-o", str(target), "--json")
    assert refused.error["code"] == "CONFLICT"
    assert headrace("eval", "download", "e", "-o", str(target), "--force").code == 0


def test_eval_samples_retry_and_compare_show_what_the_server_says(
    server: FakeServer, headrace: Run
) -> None:
    failure = {"category": "timeout", "message": "slow"}
    sample = {"row": 3, "attempt": 1, "text": "no", "reward": None, "failure": failure}
    said = [{"role": "user", "content": "Say 3"}]
    listed = {"samples": [{**sample, "messages": said}], "total_count": 1}
    server.answer("GET", "/evals/e/samples", listed)
    assert "timeout: slow" in headrace("eval", "samples", "e", "--failed").out
    assert "failed=true" in server.requests[-1].query
    shown = headrace("eval", "samples", "e", "--row", "3").out
    assert "row 3, attempt 1: no reward" in shown
    assert "user: Say 3" in shown
    started = {"id": "1", "name": "e", "status": "running"}
    server.answer("POST", "/evals/e/retry", {"eval": started, "retryable_samples": 2})
    assert "repeating 2 attempts of e" in headrace("eval", "retry", "e").out
    row = {"row": 3, "passed": [0, 1], "attempts": [2, 2], "reward": [0.25, 0.75]}
    same = {**row, "row": 4, "change": "same"}
    compared = {
        "evals": [{"name": "a", "model": "m"}, {"name": "b", "model": "n"}],
        "metrics": [{"key": "eval/pass@1", "values": [0.25, 0.5]}],
        "caveats": ["b has not ended"],
        "differences": [
            {"key": "eval/reward", "difference": 0.5, "se": 0.1, "interval": [0.3, 0.7], "rows": 2}
        ],
        "counts": {"gained": 1, "lost": 0, "same": 1, "missing": 0},
        "rows": [{**row, "change": "gained"}, same],
    }
    server.answer("GET", "/evals/a/compare/b", compared)
    out = headrace("eval", "compare", "a", "b").out
    assert "1 gained, 0 lost" in out
    assert "1 of 2, reward 0.75" in out
    assert "0.3 to 0.7" in out
    assert "note: b has not ended" in out
    document = headrace("eval", "compare", "a", "b", "--json").document
    assert [one["row"] for one in document["rows"]] == [3]
    assert len(headrace("eval", "compare", "a", "b", "--all", "--json").document["rows"]) == 2


def test_workspace_add_waits_for_the_first_look(
    server: FakeServer, headrace: Run, repository: Path
) -> None:
    pending = {"id": "w", "name": "sums", "status": "pending"}
    server.answer("POST", "/workspaces", {"workspace": pending}, status=201)
    synced = {
        **pending,
        "status": "synced",
        "rollouts": [{"entrypoint": {"rollout": "r", "path": "main.py"}, "workflow": "Solve"}],
    }
    server.answer("GET", "/workspaces/w", {"workspace": synced})
    assert headrace("workspace", "add", str(repository)).out.count("rollouts/r/main.py") == 1
    assert server.requests[0].document == {"url": str(repository)}


def test_workspace_add_prints_only_json_for_programs_while_packages_are_installed(
    server: FakeServer, headrace: Run, repository: Path
) -> None:
    rollout = {"entrypoint": {"rollout": "r", "path": "main.py"}, "environment": {"count": 2}}
    first = {"id": "w", "name": "sums", "status": "syncing"}
    server.answer("POST", "/workspaces", {"workspace": first}, status=201)
    for status in ("installing", "synced", "installing", "synced"):
        seen = {**first, "status": status, "rollouts": [rollout]}
        server.answer("GET", "/workspaces/w", {"workspace": seen})
    done = headrace("workspace", "add", str(repository), "--json")
    assert done.document["workspace"]["status"] == "synced"
    assert "installing the packages of" in headrace("workspace", "add", str(repository)).out


def test_workspace_add_says_when_it_has_no_answer_yet(
    server: FakeServer, headrace: Run, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.cli.commands.workspaces.workspace.SYNC_S", 0.3)
    first = {"id": "w", "name": "sums", "status": "syncing"}
    server.answer("POST", "/workspaces", {"workspace": first}, status=201)
    server.answer("GET", "/workspaces/w", {"workspace": first})
    said = headrace("workspace", "add", str(repository)).out
    assert "still syncing; look again with: headrace workspace info sums" in said


def test_workspace_init_makes_a_repository_with_data(headrace: Run, tmp_path: Path) -> None:
    target = tmp_path / "sums"
    ran = headrace("workspace", "init", str(target), "--json")
    assert ran.code == 0, ran.err
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=target, check=True, capture_output=True, text=True
    ).stdout.split()
    assert "rollouts/arithmetic/main.py" in tracked
    assert "configs/training/grpo.toml" in tracked
    assert len((target / "data" / "arithmetic-heldout.jsonl").read_text().splitlines()) == 200
    assert headrace("workspace", "init", str(target), "--json").error["code"] == "CONFLICT"


def test_upload_sends_a_mapping_and_names_what_nothing_reads(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    file = tmp_path / "gsm.jsonl"
    file.write_text("{}\n")
    made = {"dataset": {"id": "d"}, "upload": {"path": "/api/v1/datasets/d/content"}}
    server.answer("POST", "/datasets", made, 201)
    found = {"name": "gsm", "num_rows": 4, "unread_columns": ["source", "level"]}
    server.answer("PUT", "/datasets/d/content", {"dataset": found})
    maps = ("--map", "question=user_prompt", "--map", "answer=ground_truth")
    ran = headrace("dataset", "upload", str(file), *maps)
    assert ran.code == 0, ran.err
    assert "nothing reads the columns source, level" in ran.out
    announced = next(one for one in server.requests if one.method == "POST")
    assert announced.document["mapping"] == {"question": "user_prompt", "answer": "ground_truth"}
    wrong = headrace("dataset", "upload", str(file), "--map", "question")
    assert wrong.code == 2
    assert "COLUMN=NAME" in wrong.err


def test_warnings_of_the_server_are_printed(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    toml = tmp_path / "c.toml"
    toml.write_text("[experiment]\nmodel_path = 'm'\ndataset = 'd'\n")
    answer = {"run": {"id": "r", "name": "n"}, "warnings": ["no symbol for 'x'"]}
    server.answer("POST", "/runs", answer, 201)
    assert "warning: no symbol for 'x'" in headrace("train", "submit", str(toml)).out
    said = headrace("train", "submit", str(toml), "--json").document
    assert said["warnings"] == ["no symbol for 'x'"]


def test_a_rollout_that_is_not_committed_is_told_before_anything_is_submitted(
    server: FakeServer, headrace: Run, repository: Path
) -> None:
    toml = repository / "configs" / "grpo.toml"
    wrong = repository / "configs" / "wrong.toml"
    wrong.write_text(toml.read_text().replace('rollout = "r"', 'rollout = "rr"'))
    for verb in ("train", "eval"):
        ran = headrace(verb, "submit", str(wrong), "--json")
        assert ran.code == 1
        (issue,) = ran.error["issues"]
        assert issue["key"] == "experiment.rollout"
        assert (
            "rollouts/rr/main.py, which is not in commit HEAD; its rollouts: r" in issue["message"]
        )
        assert issue["did_you_mean"] == "r"
    wrong.write_text(toml.read_text().replace("main.py", "man.py"))
    (issue,) = headrace("train", "submit", str(wrong), "--json").error["issues"]
    assert issue["key"] == "experiment.entrypoint"
    assert "rollouts/r/man.py, which is not in commit HEAD; the files of r: " in issue["message"]
    assert issue["did_you_mean"] == "main.py"
    wrong.write_text(toml.read_text().replace('rollout = "r"', 'rollout = "rr"'))
    (repository / "rollouts" / "rr").mkdir()
    (repository / "rollouts" / "rr" / "main.py").write_text("x = 1\n")
    ran = headrace("train", "submit", str(wrong), "--json")
    assert ran.error["message"].startswith(
        "experiment.rollout names rollouts/rr/main.py, which is not"
    )
    assert "is not committed; commit it first" in ran.error["message"]
    mistyped = wrong.with_name("mistyped.toml")
    mistyped.write_text(wrong.read_text().replace("main.py", "man.py"))
    (issue,) = headrace("train", "submit", str(mistyped), "--json").error["issues"]
    assert issue == {
        "key": "experiment.entrypoint",
        "message": "names rollouts/rr/man.py, which does not exist; the files of rr, which are not "
        "committed yet: main.py",
        "did_you_mean": "main.py",
    }
    assert not [one for one in server.requests if one.path.endswith(("/runs", "/evals"))]
    server.answer("GET", "/workspaces", {"workspaces": [{"id": "w", "url": str(repository)}]})
    server.answer("POST", "/runs", {"run": {"id": "r", "name": "n"}}, 201)
    assert headrace("train", "submit", str(toml)).code == 0
    unknown = toml.read_text() + 'branch = "elsewhere"\n'
    wrong.write_text(unknown.replace('rollout = "r"', 'rollout = "rr"'))
    assert headrace("train", "submit", str(wrong)).code == 0


def test_a_scaffolded_workspace_ignores_what_does_not_belong_into_a_commit(
    headrace: Run, tmp_path: Path
) -> None:
    place = tmp_path / "w"
    assert headrace("workspace", "init", str(place), "--json").code == 0
    for litter in ("rollouts/arithmetic/__pycache__/main.pyc", ".venv/x", "adapter.safetensors"):
        (place / litter).parent.mkdir(parents=True, exist_ok=True)
        (place / litter).write_text("")
    done = subprocess.run(
        ["git", "status", "--porcelain"], cwd=place, capture_output=True, text=True, check=True
    )
    assert done.stdout == ""


def test_info_and_status_say_what_is_waited_for(headrace: Run, server: FakeServer) -> None:
    waits = [{"what": "horizon", "message": "the log is held back by pid 42"}]
    found = {"run": {"id": "1", "name": "n"}, "metrics": {}, "checkpoints": []}
    server.answer("GET", "/runs/n", {**found, "waiting_for": waits})
    assert "the log is held back by pid 42" in headrace("train", "info", "n").out
    server.answer("GET", "/status", {"waiting_for": waits})
    assert "the log is held back by pid 42" in headrace("status").out


def test_info_shows_what_teaches_a_run(headrace: Run, server: FakeServer) -> None:
    advanced = {
        "teacher": "big@3",
        "teacher_hint": "h",
        "reward_models": [{"model": "judge@2", "weight": 0.5, "name": "nice"}, {"model": "m@1"}],
        "curriculum": {"min_pass_rate": 0.125, "hard_fraction": None},
    }
    found = {"run": {"name": "n", "config": {"advanced": advanced}}}
    server.answer("GET", "/runs/n", {**found, "metrics": {}, "checkpoints": []})
    out = headrace("train", "info", "n").out
    for text in (
        "big@3, with a hint",
        "nice: judge@2 (weight 0.5), m@1 (weight 1)",
        "min_pass_rate 0.125",
    ):
        assert text in out
    assert "hard_fraction" not in out


def test_samples_show_the_agents_of_turns_and_their_own_rewards(
    headrace: Run, server: FakeServer
) -> None:
    turns = [{"turn": 1, "agent": "solver", "reward": None}, {"turn": 2, "reward": 0.25}]
    listed = {"id": "s", "prompt": "p", "text": "t"}
    for run, more, is_shown in (
        ("n", {"rewarded_turns": turns, "agent_rewards": {"critic": -2.0}}, True),
        ("m", {"rewarded_turns": [], "agent_rewards": {}}, False),
    ):
        server.answer("GET", f"/runs/{run}/samples", {"samples": [{**listed, **more}]})
        out = headrace("train", "samples", run).out
        assert ("Turns and agents" in out) is is_shown
        assert [word in out for word in ("solver", "0.25", "critic", "-2")] == [is_shown] * 4


def test_samples_show_the_parts_of_rewards_if_there_are_any(
    headrace: Run, server: FakeServer
) -> None:
    listed = {"id": "s", "prompt": "p", "text": "t", "reward": 0.7}
    for run, parts in (("n", {"form": 1.0, "near": 0.5}), ("m", {})):
        samples = [{**listed, "parts": parts}, listed]
        server.answer("GET", f"/runs/{run}/samples", {"samples": samples})
        out = headrace("train", "samples", run).out
        assert [text in out for text in ("parts", "form 1, near 0.5")] == [bool(parts)] * 2


def test_a_workspace_shows_why_its_forge_refused_a_status(
    server: FakeServer, headrace: Run
) -> None:
    error = "refs/heads/main at c0ffee: h answers 307"
    server.answer("GET", "/workspaces/w", {"workspace": {"name": "w", "status_error": error}})
    assert error in headrace("workspace", "info", "w").out


def test_a_stop_tells_what_the_run_waits_for(server: FakeServer, headrace: Run) -> None:
    said = "r will stop when its learner is idle, with a checkpoint of its last step, if any\n"
    held = {"what": "release", "message": "start newer workers"}
    for waits in ({"waiting_for": [held]}, {}):
        server.answer("POST", "/runs/r/stop", {"run": {}, **waits})
    assert headrace("train", "stop", "r").out == f"{said}now it waits: start newer workers\n"
    assert headrace("train", "stop", "r").out == said
