"""Envelopes, exit codes, and the messages that a user sees when something fails."""

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from producers.cli.display.output import print_failure
from schemas.errors import Issue
from tests.unit.producers.cli.conftest import FakeServer, Run

COMMANDS = (
    ["models"],
    ["workspace", "list"],
    ["workspace", "info", "w"],
    ["dataset", "list"],
    ["dataset", "info", "d"],
    ["dataset", "preview", "d"],
    ["artifact", "list"],
    ["artifact", "info", "task", "t"],
    ["artifact", "versions", "task", "t"],
    ["artifact", "pull", "task", "t"],
    ["train", "list"],
    ["train", "info", "r"],
    ["train", "logs", "r"],
    ["train", "stop", "r"],
    ["train", "pause", "r"],
    ["train", "resume", "r"],
    ["train", "samples", "r"],
    ["train", "compare", "r", "q"],
    ["train", "trace", "r", "--sample", "s"],
    ["eval", "list"],
    ["eval", "info", "e"],
    ["eval", "logs", "e"],
    ["eval", "stop", "e"],
    ["checkpoint", "list", "r"],
    ["checkpoint", "info", "r@last"],
    ["events", "r"],
    ["dlq", "list"],
    ["dlq", "show", "0b8f6d0f"],
    ["dlq", "redrive", "0b8f6d0f"],
    ["status"],
    ["rebuild"],
)


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_refusal_is_a_json_envelope_on_stderr(
    server: FakeServer, headrace: Run, arguments: list[str]
) -> None:
    ran = headrace(*arguments, "--json")
    assert ran.code == 1
    assert ran.out == ""
    assert ran.error["code"] == "NOT_FOUND"
    assert ran.error["issues"] == []
    assert server.requests[-1].headers["Authorization"] == "Bearer the-api-key"


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_without_json_a_refusal_is_a_sentence(
    server: FakeServer, headrace: Run, arguments: list[str]
) -> None:
    ran = headrace(*arguments)
    assert ran.code == 1
    assert ran.err.startswith("Error: there is no /api/v1/")


def test_issues_of_the_server_reach_the_user(
    server: FakeServer, headrace: Run, tmp_path: Path
) -> None:
    issue = {"key": "training.lrr", "message": "unknown key", "did_you_mean": "training.lr"}
    problem = {"detail": "the config is not valid", "code": "VALIDATION", "issues": [issue]}
    server.answer("POST", "/runs", problem, status=400)
    config = tmp_path / "sft.toml"
    config.write_text('[experiment]\nmodel_path = "scratch:x"\ndataset = "d"\n')
    ran = headrace("train", "submit", str(config), "--json")
    assert ran.code == 1
    assert ran.error == {
        "code": "VALIDATION",
        "message": "the config is not valid",
        "issues": [issue],
    }
    told = headrace("train", "submit", str(config)).err
    assert "training.lrr: unknown key (did you mean training.lr?)" in told


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["train", "info"], ["train", "samples", "r", "--step", "x"]]
)
def test_usage_errors_exit_2_as_json_too(headrace: Run, arguments: list[str]) -> None:
    ran = headrace(*arguments, "--json")
    assert ran.code == 2
    assert ran.error["code"] == "USAGE"
    assert headrace(*arguments).code == 2


def test_a_server_that_is_not_there_is_named_with_the_command_that_starts_one(
    headrace: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setattr("producers.cli.client.BACKOFF_S", (0.0,))
    ran = headrace("train", "list", "--json")
    assert ran.code == 1
    assert ran.error["code"] == "UNREACHABLE"
    assert "no Headrace server answers at http://127.0.0.1:9" in ran.error["message"]
    assert "`headrace up --detach`" in ran.error["message"]


def test_a_bad_setting_is_one_line(headrace: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_URL", "localhost")
    ran = headrace("models", "--json")
    assert ran.code == 1
    assert ran.error["code"] == "VALIDATION"
    assert "HEADRACE_URL holds 'localhost'" in ran.error["message"]


def test_an_answer_that_is_not_ours_is_named(server: FakeServer, headrace: Run) -> None:
    server.raw("GET", "/models", b"<html>hello</html>")
    assert headrace("models", "--json").error["code"] == "BAD_ANSWER"


def test_the_local_api_key_is_read_from_the_home(
    server: FakeServer, headrace: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HEADRACE_API_KEY")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text("from-the-file\n")
    headrace("models", "--json")
    assert server.requests[-1].headers["Authorization"] == "Bearer from-the-file"


def test_hostile_text_does_not_reach_the_terminal_as_control_characters(
    server: FakeServer, headrace: Run
) -> None:
    sample = {"id": "s", "prompt": "p", "text": "\x1b[2J\x1b]0;x\x07bad", "reward": 0.0}
    server.answer("GET", "/runs/r/samples", {"samples": [sample]})
    out = headrace("train", "samples", "r").out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "bad" in out


def _every_help() -> list[list[str]]:
    from producers.cli.main import COMMANDS as TREE

    groups = {
        "workspace": ["add", "list", "info", "init"],
        "dataset": ["upload", "list", "info", "preview", "download", "validate"],
        "artifact": ["push", "list", "info", "versions", "pull", "delete"],
        "train": [
            *["submit", "list", "info", "watch", "logs", "stop", "pause", "resume"],
            *["samples", "compare", "trace"],
        ],
        "rollout": ["init", "list", "validate", "test"],
        "eval": [
            *["submit", "run", "list", "info", "logs", "stop"],
            *["samples", "retry", "compare", "download"],
        ],
        "checkpoint": ["list", "info", "download", "merge", "chat"],
        "model": ["deploy", "undeploy", "list", "info"],
        "dlq": ["list", "show", "redrive"],
        "key": ["create", "list", "rotate", "revoke"],
        "sessions": ["list", "end"],
        "org": ["create", "list", "show", "rename"],
        "member": ["list", "invite", "invitations", "uninvite", "role", "remove"],
        "person": ["list", "remove"],
        "secret": ["set", "list", "delete", "rotate-key"],
    }
    single = [[name] for name in TREE if name not in groups]
    return single + [[name, inner] for name, inners in groups.items() for inner in inners]


@pytest.mark.parametrize("arguments", _every_help(), ids=" ".join)
def test_every_command_has_help_with_an_example_and_json(
    headrace: Run, arguments: list[str]
) -> None:
    ran = headrace(*arguments, "--help")
    assert ran.code == 0
    assert "Example:" in ran.out
    assert f"headrace {' '.join(arguments)}" in ran.out
    assert "--json" in ran.out


def test_help_costs_little_and_imports_nothing_heavy() -> None:
    program = (
        "import sys, time; from producers.cli.main import main; main(['--help']);"
        "heavy = {'torch', 'asyncpg', 'aiokafka', 'pydantic', 'httpx', 'rich', 'tomllib'};"
        "print('FOUND', sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "FOUND []" in done.stderr


def test_success_carries_the_schema_version(server: FakeServer, headrace: Run) -> None:
    answer = {"runs": [], "total_count": 0, "has_more": False, "next_offset": None}
    server.answer("GET", "/runs", answer)
    ran = headrace("train", "list", "--json", "--status", "running")
    assert ran.code == 0
    assert ran.document == {"schema_version": 1, **answer}
    assert server.requests[-1].query == "limit=50&offset=0&status=running"
    assert json.loads(ran.out.splitlines()[0]) == ran.document


def test_the_version_is_printed(headrace: Run) -> None:
    ran = headrace("--version")
    assert (ran.code, ran.err) == (0, "")
    name, _, number = ran.out.strip().partition(" ")
    assert name == "headrace"
    assert number[0].isdigit()


@pytest.mark.parametrize(
    ("message", "issues", "told"),
    [
        ("it broke", [], "Error: it broke\n"),
        (
            "Invalid training config: a.b Unrecognized key; did you mean a.c?",
            [("a.b", "Unrecognized key", "a.c")],
            "Error: Invalid training config: a.b Unrecognized key; did you mean a.c?\n",
        ),
        (
            "there is no dataset 'x'",
            [("experiment.dataset", "there is no dataset 'x'", "y")],
            "Error: there is no dataset 'x' (did you mean y?)\n",
        ),
        (
            "Invalid training config: a.b is wrong (and 1 more)",
            [("a.b", "is wrong", None), ("c.d", "is bad", "c.e")],
            "Error: Invalid training config: 2 problems\n"
            "  - a.b: is wrong\n  - c.d: is bad (did you mean c.e?)\n",
        ),
        (
            "f.csv cannot be a dataset: line 5 is short",
            [("line 5", "is short", None), ("line 6", "is short", None)],
            "Error: f.csv cannot be a dataset: 2 problems\n  - line 5: is short\n  - line 6: is short\n",
        ),
        (
            "the config is not valid",
            [("a.b", "is wrong", None)],
            "Error: the config is not valid\n  - a.b: is wrong\n",
        ),
    ],
)
def test_each_error_is_said_once(
    message: str,
    issues: list[tuple[str, str, str | None]],
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_failure("X", message, [Issue(*issue) for issue in issues], as_json=False)
    assert capsys.readouterr().err == told


def draw(columns: int, name: str) -> str:
    """A table with this name, drawn on a dumb terminal of this many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    program = (
        "from producers.cli.display.output import print_table;"
        f"print_table('', ('name', 'x'), [({name!r}, 'y' * 60)])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"} | {"TERM": "dumb"}
    with subprocess.Popen([sys.executable, "-c", program], stdout=theirs, env=environment) as child:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while data := os.read(ours, 65_536):
                shown += data
    os.close(ours)
    assert child.returncode == 0
    return shown.decode()


def test_a_name_is_not_cut_on_a_wide_terminal_and_folded_on_a_narrow_one() -> None:
    name = "a-run-with-a-long-name-" + "0123456789" * 8
    assert name in draw(200, name)
    narrow = draw(60, name)
    assert "…" not in narrow
    letters = "".join(c for c in narrow if c in "0123456789")
    assert "0123456789" * 8 in letters


def test_a_paused_run_is_listed_as_paused_with_the_time_left_beside_the_others(
    server: FakeServer, headrace: Run
) -> None:
    began = (datetime.now(UTC) - timedelta(minutes=10)).isoformat()
    common = {"status": "running", "current_step": 5, "total_steps": 10, "started_at": began}
    runs = [
        {"name": "resting", "phase": "paused", **common},
        {"name": "busy", "phase": "train", **common},
    ]
    server.answer("GET", "/runs", {"runs": runs, "total_count": 2})
    out = headrace("train", "list").out
    resting, busy = (next(s for s in out.splitlines() if n in s) for n in ("resting", "busy"))
    assert "paused" in resting
    assert "left" not in resting
    assert "running" in busy
    assert "5/10 (about 10.0 min left)" in busy
    code = {"workspace": "732be128fafe5ba8", "workspace_name": "letters"}
    answer = {"run": runs[0] | code, "metrics": {}, "checkpoints": []}
    server.answer("GET", "/runs/resting", answer)
    lines = headrace("train", "info", "resting").out.splitlines()
    status = next(s for s in lines if "status" in s)
    assert "paused" in status
    [workspace] = [s for s in lines if "workspace" in s]
    assert "letters" in workspace
    assert "732be128fafe5ba8" not in workspace
    assert headrace("train", "info", "resting", "--json").document["run"]["status"] == "running"


def test_a_run_and_its_cost_are_one_line_of_100_columns(
    server: FakeServer, headrace: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    hours = {"device_hours": {"cpu": 0.1}, "effects": {"TrainStep": 360.0}, "wasted": {}}
    tokens = {f"tokens_{name}": 29969 for name in ("sampled", "trained", "discarded")}
    cost = {"key": "1", "name": None, "cost": 0.0002745, "calls_usd": 0.0, "stored_bytes": 1}
    run = {
        "name": "arithmetic-grpo",
        "status": "finished",
        "algorithm": "grpo",
        "model": "arithmetic-sft@last",
        "dataset": "arithmetic-rl",
        "current_step": 100,
        "total_steps": 100,
        "created_at": datetime.now(UTC).isoformat(),
        "cost": cost | hours | tokens,
    }
    server.answer("GET", "/runs", {"runs": [run], "total_count": 1})
    out = headrace("train", "list", "--cost").out
    [line] = [line for line in out.splitlines() if "arithmetic-grpo" in line]
    assert "$0.0002745" in line
    assert "cpu 360.0 s" in line
