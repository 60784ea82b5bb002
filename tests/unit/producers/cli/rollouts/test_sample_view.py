"""One sample, as the command line shows and downloads it. Its texts and names come from user code."""

import json
from pathlib import Path

import httpx
import pytest

from producers.cli.client import Client, ServerAddress
from producers.cli.rollouts.sample_view import show_sample, show_search

RED = "\x1b[31m"
SAMPLE = {
    "id": "r1-train-1-0-0.0",
    "step": 1,
    "slot": 0,
    "row": 4,
    "messages": [
        {"role": "user", "content": "2 * 3?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": f"I multiply{RED}",
            "tool_calls": [
                {"id": "c1", "function": {"name": "multiply", "arguments": '{"a": 2, "b": 3}'}}
            ],
        },
        {"role": "tool", "content": f"6{RED}", "tool_call_id": "c1"},
        {"role": "assistant", "content": "6"},
    ],
    "tools": [{"name": "multiply"}],
    "reward": 0.75,
    "parts": {"exact": 1.0, "short": 0.5},
    "rewarded_turns": [
        {"turn": 0, "agent": f"solver{RED}", "reward": None},
        {"turn": 2, "agent": "critic", "reward": 0.25},
    ],
    "agent_rewards": {"critic": -1.0},
    "failure": {"category": "agent_error", "message": f"it failed{RED}"},
    "output": {
        "stdout": f"hello{RED}\n",
        "traceback": f"ValueError: no{RED}",
        "files": {"a/note.txt": 4, "../../up": 2, ".ssh/key": 2},
        "is_cut": True,
    },
    "grader_output": {"stdout": "graded\n", "traceback": None, "files": {}, "is_cut": False},
}


def answer(request: httpx.Request) -> httpx.Response:
    if "/files/" in request.url.path:
        return httpx.Response(200, content=request.url.path.rpartition("/files/")[2].encode())
    return httpx.Response(200, json={"sample": SAMPLE})


def client() -> Client:
    return Client(ServerAddress("http://server", None), transport=httpx.MockTransport(answer))


BRANCHES = [
    SAMPLE["messages"],
    [{"role": "user", "content": "Is it 6?"}, {"role": "assistant", "content": f"Yes.{RED}"}],
]


def test_a_sample_is_shown_turn_by_turn(capsys: pytest.CaptureFixture[str]) -> None:
    show_sample(client(), "/runs/r1/samples/s", files=None, as_json=False)
    shown = capsys.readouterr().out
    for text in (
        'calls multiply({"a": 2, "b": 3})',
        "(reasoning) I multiply",
        "[tool] answers c1",
        "reward: 0.75 (exact 1, short 0.5)",
        "turn 0: solver",
        "turn 2: critic, reward 0.25",
        "agent critic: reward -1",
        "error: agent_error: it failed",
        "ValueError: no",
        "printed by the grader:",
        "file: a/note.txt (4 bytes)",
        "a part was left out",
    ):
        assert text in shown
    assert "\x1b" not in shown


def test_branches_are_shown_once_each_and_kept_in_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SAMPLE, "branches", BRANCHES)
    show_sample(client(), "/runs/r1/samples/s", files=None, as_json=False)
    shown = capsys.readouterr().out
    assert shown.count("2 * 3?") == 1, "it is the conversation that is shown first"
    assert "branch 1 of 2" not in shown
    assert shown.index("calls multiply") < shown.index("branch 2 of 2:") < shown.index("Is it 6?")
    assert shown.index("Yes.") < shown.index("reward: 0.75")
    assert "\x1b" not in shown
    show_sample(client(), "/runs/r1/samples/s", files=None, as_json=True)
    assert json.loads(capsys.readouterr().out)["sample"]["branches"] == BRANCHES


def test_files_stay_inside_of_the_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = tmp_path / "a" / "b"
    show_sample(client(), "/runs/r1/samples/s", files=inside, as_json=True)
    saved = [Path(path) for path in json.loads(capsys.readouterr().out)["saved"]]
    written = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert written == sorted(saved)
    assert all(path.resolve().is_relative_to(inside) for path in written)
    assert (inside / "a" / "note.txt").exists()


def test_a_search_shows_what_it_found_and_how_to_search_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {"where": "system", "before": f"Be {RED}", "words": "brief", "after": "."}
    answer = {
        "samples": [{"sample": "r1-train-4-0-0.0", "reward": 0.5, "found": found}],
        "searched": {"samples": 8, "groups": 2, "newest_step": 4, "oldest_step": 3},
        "next_place": "2.1.0.0",
    }
    address = ServerAddress(url="http://127.0.0.1:1", api_key="t")
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=answer))
    with Client(address, transport=transport) as searching:
        show_search(searching, "/runs/r1/search", "brief", place=None, limit=9, as_json=False)
    shown = capsys.readouterr().out
    assert RED not in shown
    assert "1 found in 8 samples read, steps 4 to 3" in shown
    assert "brief" in shown
    assert "--place 2.1.0.0" in shown
