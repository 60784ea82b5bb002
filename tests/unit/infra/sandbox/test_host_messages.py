"""What a process says that its user code left behind is checked before it is used."""

import base64
import json

import pytest

from infra.sandbox import host_messages
from infra.sandbox.host_messages import (
    MOST_FILES,
    MOST_PRINTED,
    ProtocolError,
    Returned,
    parse_later,
    read_files,
)


def returned(**output: object) -> Returned:
    data = json.dumps({"id": "s", "messages": None, "output": output}).encode()
    parsed = parse_later("workflow", data)
    assert isinstance(parsed, Returned)
    return parsed


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../up",
        "a/../b",
        "a//b",
        ".ssh",
        "a/.b",
        "a b",
        "a\x1b",
        "é",
        "x" * 101,
        "a/",
    ],
)
def test_a_file_has_a_plain_relative_name(name: str) -> None:
    with pytest.raises(ProtocolError):
        returned(files={name: ""})


def test_texts_and_files_are_bounded() -> None:
    returned(stdout="x" * MOST_PRINTED, files={f"f{n}": "" for n in range(MOST_FILES)})
    for output in (
        {"stdout": "x" * (MOST_PRINTED + 1)},
        {"traceback": "x" * 20_000},
        {"files": {f"f{n}": "" for n in range(MOST_FILES + 1)}},
        {"more": "x"},
    ):
        with pytest.raises(ProtocolError):
            returned(**output)


def test_the_bytes_of_files_are_bounded_and_base64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_messages, "MOST_FILE_BYTES", 10)
    text = base64.b64encode(b"12345").decode()
    good = returned(files={"a/b.txt": text, "c": text}).output
    assert good is not None
    assert read_files(good) == {"a/b.txt": b"12345", "c": b"12345"}
    for files in ({"a": text, "b": text, "c": text}, {"a": "not base64!"}, {"a": "YQ"}):
        bad = returned(files=files).output
        assert bad is not None
        with pytest.raises(ProtocolError):
            read_files(bad)


def rewarded(turn_rewards: str) -> bytes:
    return b'{"id": "a", "messages": null, "turn_rewards": %s}' % turn_rewards.encode()


def test_rewards_of_turns_are_pairs() -> None:
    answer = parse_later("workflow", rewarded("[[0, 1], [255, -0.5]]"))
    assert isinstance(answer, Returned)
    assert dict(answer.turn_rewards) == {0: 1.0, 255: -0.5}
    assert parse_later("workflow", b'{"id": "a", "messages": null}') == Returned(
        id="a", messages=None
    )


def test_agents_are_pairs_with_turns_and_with_rewards() -> None:
    said = b'"turn_agents": [[0, "solver"], [2, "a-1"]], "agent_rewards": [["solver", 1]]'
    answer = parse_later("workflow", b'{"id": "a", "messages": null, %s}' % said)
    assert isinstance(answer, Returned)
    assert dict(answer.turn_agents) == {0: "solver", 2: "a-1"}
    assert dict(answer.agent_rewards) == {"solver": 1.0}


@pytest.mark.parametrize(
    "said",
    [
        '"turn_agents": [[0, "a"], [0, "b"]]',
        '"turn_agents": [[256, "a"]]',
        '"turn_agents": [[0, ""]]',
        '"turn_agents": [[0, "a b"]]',
        '"turn_agents": [[0, "a\\n"]]',
        '"turn_agents": [[0, "' + "a" * 64 + '"]]',
        '"turn_agents": [[0, 1]]',
        '"agent_rewards": [["a", 1], ["a", 2]]',
        '"agent_rewards": [["a", NaN]]',
        '"agent_rewards": [["a", 1000001]]',
        '"agent_rewards": [["1", 1]]',
        '"agent_rewards": [' + ", ".join(f'["a{n}", 1]' for n in range(65)) + "]",
    ],
)
def test_unusable_agents_are_refused(said: str) -> None:
    with pytest.raises(ProtocolError):
        parse_later("workflow", f'{{"id": "a", "messages": null, {said}}}'.encode())


@pytest.mark.parametrize(
    "turn_rewards",
    [
        "[[0, NaN]]",
        "[[0, Infinity]]",
        "[[0, 1e999]]",
        "[[0, 1000001]]",
        "[[0, null]]",
        '[[0, "1"]]',
        "[[0, 1], [0, 1]]",
        "[[-1, 1]]",
        "[[256, 1]]",
        "[[0.5, 1]]",
        "[[0, 1, 2]]",
        '{"0": 1}',
        "[" + ", ".join(f"[{n % 256}, 1]" for n in range(257)) + "]",
    ],
)
def test_unusable_rewards_of_turns_are_refused(turn_rewards: str) -> None:
    """Whatever the SDK checks: code of the workspace may write into the pipe itself."""
    with pytest.raises(ProtocolError):
        parse_later("workflow", rewarded(turn_rewards))
