"""The demo's verdict, its own platform, and its message about the next steps."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from infra.operations.local.home import own
from producers.cli.demo.command import (
    _directory_to_keep,
    activation,
    check_equal_weights,
    check_promise,
    cpu_seconds_used,
    invitation,
    next_commands,
)
from producers.cli.demo.platform import DemoPlatform
from producers.cli.demo.story import EXACT, NEAR, RANDOM_GRADER, ROLLOUT, Story
from producers.cli.errors import Failure
from producers.cli.scaffold import example_directory
from tests.unit.producers.cli.conftest import Run


def held_out(greedy: float, sampled: float) -> dict[str, dict[str, float]]:
    before = {"greedy": 0.3, "sampled": 0.3}
    return {"before": before, "after": {"greedy": greedy, "sampled": sampled}}


@pytest.mark.parametrize(("greedy", "sampled"), [(0.89, 0.9), (1.0, 0.74), (0.3, 0.3)])
def test_a_reward_that_did_not_rise_as_promised_fails(greedy: float, sampled: float) -> None:
    with pytest.raises(Failure, match=r"the held-out reward went from 0\.300 to"):
        check_promise(held_out(greedy, sampled))


def test_a_reward_that_was_high_before_is_no_rise() -> None:
    high = {"greedy": 0.95, "sampled": 0.8}
    with pytest.raises(Failure):
        check_promise({"before": high, "after": high})


def test_a_promise_that_was_kept_passes() -> None:
    check_promise(held_out(0.9, 0.75))


def test_the_demo_ends_with_three_commands_to_try_next() -> None:
    lines = next_commands("HEADRACE_HOME=x", "arithmetic-grpo-5a1@100")
    assert len(next_commands(None, "arithmetic-grpo@100")) == len(lines) == 3
    assert all(line.startswith("HEADRACE_HOME=x headrace") for line in lines)
    assert " train samples arithmetic-grpo-5a1 " in lines[1]
    assert " checkpoint chat arithmetic-grpo-5a1@100 " in lines[2]


def test_the_demo_ends_with_an_invitation_in_one_line() -> None:
    line = invitation("HEADRACE_HOME=x HEADRACE_URL=y", "arithmetic-grpo-5a1@100")
    assert line.startswith("export HEADRACE_HOME=x HEADRACE_URL=y; headrace up --detach; ")
    assert " train regrade arithmetic-grpo-5a1 --grader near-misses " in line
    assert " train fork arithmetic-grpo-5a1@50 " in line
    assert "\n" not in line


def test_commands_to_try_work_in_a_shell_that_does_not_know_the_environment_of_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "bin" / "activate"
    script.parent.mkdir()
    script.touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    assert activation() == f". {script}"
    (script.parent / "headrace").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    assert activation() is None


def test_the_other_grader_pays_for_near_misses(tmp_path: Path) -> None:
    source = (example_directory() / ROLLOUT).read_text()
    near = source.replace(EXACT, NEAR)
    assert near != source, "the example's grader has changed: change EXACT in story.py too"
    rewarded: dict[str, float] = {}
    answers = {"a": "4+4=8", "b": "4+4=9", "c": "4+4=x", "d": "8", "e": "4+4=" + "9" * 5000}
    samples = {name: SimpleNamespace(text=text) for name, text in answers.items()}
    ctx = SimpleNamespace(samples=samples, label="8", set_sample_reward=rewarded.__setitem__)
    found: dict[str, Any] = {}
    exec(compile(near, "main.py", "exec"), found)  # noqa: S102 - the demo's own file
    asyncio.run(found["Check"]().grade(ctx))
    assert rewarded == {"a": 1.0, "b": 0.5, "c": 0.0, "d": 0.0, "e": 0.0}


def test_a_directory_in_use_is_not_taken(headrace: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = headrace("demo", "--keep", str(tmp_path), "--json")
    assert ran.code == 1
    assert ran.error["code"] == "CONFLICT"


def test_steps_beyond_one_epoch_get_more_epochs() -> None:
    story = Story.__new__(Story)
    story._root, story._mark = example_directory(), ""
    config = story._grpo(story._grpo_overrides(7, 250, random_reward=True))
    assert config["advanced"]["seed"] == 7
    assert config["advanced"]["max_steps"] == 250
    assert config["training"]["total_epochs"] == 3
    assert config["experiment"]["entrypoint"] == "random_reward.py"


def test_a_story_told_again_on_one_server_has_names_of_its_own() -> None:
    story = Story.__new__(Story)
    story._root, story._mark = example_directory(), "a1"
    config = story._grpo(story._grpo_overrides(7, 100, random_reward=False))
    assert config["experiment"]["model_path"] == "arithmetic-sft-a1@last"
    assert config["experiment"]["dataset"] == "arithmetic-rl-a1"
    assert config["advanced"]["validation_dataset"] == "arithmetic-heldout-a1"
    assert story._sft(7)["experiment"]["dataset"] == "arithmetic-sft-a1"


@pytest.mark.parametrize(("kills", "killed"), [(0, "ab"), (3, "cd")])
def test_chaos_without_a_kill_or_with_other_bits_fails(kills: int, killed: str) -> None:
    found = {"kills": kills, "undisturbed_sha256": "ab", "killed_sha256": killed}
    with pytest.raises(Failure, match="kills the weights are"):
        check_equal_weights(found)
    check_equal_weights({"kills": 1, "undisturbed_sha256": "ab", "killed_sha256": "ab"})


def test_the_control_experiment_is_a_program() -> None:
    compile(RANDOM_GRADER, "random_reward.py", "exec")


def test_cpu_seconds_are_counted() -> None:
    assert cpu_seconds_used() > 0


def test_a_demo_keeps_its_state_unless_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _directory_to_keep(None, discard=False) == Path("headrace-demo")
    (tmp_path / "headrace-demo").mkdir()
    assert _directory_to_keep(None, discard=False) == Path("headrace-demo-2")
    assert _directory_to_keep(None, discard=True) is None
    assert _directory_to_keep(tmp_path / "mine", discard=False) == tmp_path / "mine"
    with pytest.raises(click.UsageError):
        _directory_to_keep(tmp_path / "mine", discard=True)


@pytest.mark.parametrize(("arguments", "kept"), [([], True), (["--discard"], False)])
def test_the_state_of_a_demo_stays_or_goes_as_asked(
    headrace: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    kept: bool,
) -> None:
    """The platform starts nothing, and the story ends at its first line."""
    made: list[Path] = []

    def start(self: DemoPlatform) -> None:
        self.home.mkdir(parents=True)
        (self.home.parent / "workspace").mkdir()
        made.append(self.home.parent)
        raise Failure("FAILED", "enough")

    monkeypatch.setattr(DemoPlatform, "start", start)
    monkeypatch.chdir(tmp_path)
    ran = headrace("demo", *arguments)
    assert "enough" in ran.err
    (root,) = made
    assert ran.out.startswith(f"All state will be in {root};") is kept
    assert root.exists() is kept
    if kept:
        assert root == tmp_path / "headrace-demo"
        assert headrace("demo", "--remove", "headrace-demo").code == 0
        assert not root.exists()
        (tmp_path / "mine").mkdir()
        ran = headrace("demo", "--remove", "mine")
        assert ran.code == 1
        assert "no demo made it" in ran.err
        assert (tmp_path / "mine").exists()


def test_the_state_of_a_killed_demo_is_removed_with_its_database(
    headrace: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed when there is a home with a database, and no workspace yet."""
    removed: list[Path] = []

    def start(self: DemoPlatform) -> None:
        self.home.mkdir()
        raise Failure("KILLED", "nothing after this happens")

    monkeypatch.setattr(DemoPlatform, "start", start)
    monkeypatch.setattr(DemoPlatform, "remove_database", lambda self: removed.append(self.home))
    root = tmp_path / "mine"
    assert headrace("demo", "--keep", str(root)).code == 1
    assert headrace("demo", "--remove", str(root)).code == 0
    assert removed == [root / "home"]
    assert not root.exists()


def test_a_demo_that_still_runs_is_not_removed(
    headrace: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producers.cli.demo.command.STOPPING_S", 0.2)
    (tmp_path / "mine" / "home").mkdir(parents=True)
    (tmp_path / "mine" / "workspace").mkdir()
    with own(tmp_path / "mine" / "home"):
        ran = headrace("demo", "--remove", str(tmp_path / "mine"))
    assert "still running" in ran.err
    assert (tmp_path / "mine").exists()


def test_an_interrupted_demo_says_what_goes_on_and_how_to_remove_it(
    headrace: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: DemoPlatform) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DemoPlatform, "start", start)
    root = tmp_path / "mine"
    ran = headrace("demo", "--keep", str(root))
    assert ran.code == 130
    assert f"headrace demo --remove {root}" in ran.err
    assert "not the rest of the demo" in ran.err
    assert f"HEADRACE_HOME={root / 'home'}" in ran.err
    assert headrace("demo", "--remove", str(root)).code == 0
