"""`headrace demo`: train a model from start to finish on this machine and check the result.

The demo starts its own platform (home, database, server, worker) next to anything else that runs here,
and stops it at the end. The model is made from scratch, taught with demonstrations (SFT), measured on
held-out questions, improved by reinforcement learning, and measured again.
"""

import itertools
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import click

from producers.cli.command import command
from producers.cli.display.output import (
    Document,
    Output,
    print_fields,
    print_json,
    print_table,
    say,
)
from producers.cli.errors import Failure, Interrupted

if TYPE_CHECKING:
    from producers.cli.demo.platform import DemoTarget

GREEDY_PROMISE = 0.9
SAMPLED_PROMISE = 0.75
DEFAULT_DIRECTORY = "headrace-demo"
STOPPING_S = 15.0
MARK = ".headrace-demo"
"""The file that a demo writes first, so that its directory is known as a demo's however it ends."""


@command(None, "demo", example="headrace demo --keep ./demo")
@click.option(
    "--keep",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Directory for all state; it must be empty or new.  [default: ./headrace-demo, or the first "
    "of ./headrace-demo-2, ./headrace-demo-3 and so on that is new]",
)
@click.option("--discard", is_flag=True, help="Delete all state at the end.")
@click.option(
    "--remove",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Delete the state of an earlier demo, including its database, and exit.",
)
@click.option("--seed", default=0, show_default=True, help="Seed for data, model and training.")
@click.option(
    "--steps", default=100, show_default=True, help="Number of reinforcement learning steps."
)
@click.option(
    "--grader",
    type=click.Choice(["check", "random"]),
    default="check",
    help="Source of training rewards. random is a control experiment: the model should not improve.",
)
@click.option(
    "--chaos",
    is_flag=True,
    help="Train a second time while workers are killed; the final weights must be identical.",
)
@click.option(
    "--here",
    is_flag=True,
    help="Use the server that is already running instead of starting a new one.",
)
def demo(
    *,
    keep: Path | None,
    discard: bool,
    remove: Path | None,
    seed: int,
    steps: int,
    grader: str,
    chaos: bool,
    here: bool,
    as_json: bool,
) -> Output | None:
    """Train a small language model from scratch, then improve it with reinforcement learning. This takes
    about five minutes on two cores.

    The exit code is 1 unless the held-out reward rises to at least 0.9 (greedy) and 0.75 (sampled). All
    state is kept in a directory, which is printed first, for you to examine, unless you pass --discard.
    Remove it with --remove, which also removes the database.
    """
    from producers.cli.demo.platform import DemoPlatform, RunningPlatform
    from producers.cli.demo.story import Story

    if remove is not None:
        return _remove(remove)
    started = time.monotonic()
    keep = _directory_to_keep(keep, discard=discard)
    root = (keep or Path(tempfile.mkdtemp(prefix="headrace-demo-"))).resolve()
    if keep is not None and not as_json:
        say(f"All state will be in {root}; remove it with: headrace demo --remove {root}")
    platform: DemoTarget = RunningPlatform() if here else DemoPlatform(root)
    try:
        _mark(root)
        client = platform.start()
        mark = uuid4().hex[:6] if here else ""
        story = Story(client, root / "workspace", home=platform.home, quiet=as_json, mark=mark)
        measured = story.tell(seed=seed, steps=steps, random_reward=grader == "random", chaos=chaos)
    except (KeyboardInterrupt, Interrupted) as error:
        raise _interruption(platform, root if keep else None, here=here) from error
    finally:
        _call_without_sigint(platform.stop)
        if keep is None:
            platform.remove_database()
            shutil.rmtree(root, ignore_errors=True)
    result: Document = {
        **measured,
        "wall_s": round(time.monotonic() - started, 1),
        "cpu_s": cpu_seconds_used(),
    }
    if as_json:
        print_json(result)
    else:
        _print_result(result, platform if keep else None)
        if keep is not None and not here:
            say(f"All state is kept in {root}; delete it with: headrace demo --remove {root}")
    check_promise(result["held_out"])
    if chaos:
        check_equal_weights(result["chaos"])
    return None


def _directory_to_keep(keep: Path | None, *, discard: bool) -> Path | None:
    """The directory in which state is kept, or None to keep nothing. Raises Failure when the directory
    is not empty, and UsageError when both options are given."""
    if keep is not None:
        if discard:
            raise click.UsageError("--keep and --discard exclude each other; give only one of them")
        if keep.exists() and any(keep.iterdir()):
            raise Failure("CONFLICT", f"{keep} is not empty; name a new or empty directory")
        return keep
    if discard:
        return None
    others = (f"{DEFAULT_DIRECTORY}-{n}" for n in itertools.count(2))
    return next(
        Path(name)
        for name in itertools.chain([DEFAULT_DIRECTORY], others)
        if not Path(name).exists()
    )


def _is_running(home: Path) -> bool:
    """Whether a demo's supervisor still runs. One whose demo was just killed gets time to stop."""
    from infra.operations.local.home import owner

    deadline = time.monotonic() + STOPPING_S
    while owner(home) is not None:
        if time.monotonic() > deadline:
            return True
        time.sleep(0.1)
    return False


def _mark(root: Path) -> None:
    """Mark a directory as a demo's. Raises Failure when nothing can be written there."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        (root / MARK).touch()
    except OSError as error:
        raise Failure(
            "FAILED", f"{root} cannot be used ({error.strerror}); name another one with --keep"
        ) from error


def _is_demo(root: Path) -> bool:
    """Whether a demo made this directory. Demos of older versions left no mark, but both of these."""
    return (root / MARK).is_file() or all((root / name).is_dir() for name in ("home", "workspace"))


def _remove(directory: Path) -> Output:
    """Delete the state of a demo. Raises Failure when there is none, or when it is still running."""
    from producers.cli.demo.platform import DemoPlatform

    root = directory.resolve()
    platform = DemoPlatform(root)
    if not _is_demo(root):
        raise Failure(
            "NOT_FOUND",
            f"{directory} has no file {MARK}, so no demo made it; name the directory that the demo "
            "printed first",
        )
    if _is_running(platform.home):
        command = f"HEADRACE_HOME={platform.home} headrace down"
        raise Failure(
            "CONFLICT", f"the demo in {directory} is still running; stop it with: {command}"
        )
    platform.remove_database()
    shutil.rmtree(root)
    return Output({"removed": str(root)}, f"removed {directory}")


def cpu_seconds_used() -> float:
    """CPU seconds used by this process, and by those of its child processes that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return round(sum(u.ru_utime + u.ru_stime for u in used), 1)


def check_promise(held_out: Document) -> None:
    """Raises Failure unless the held-out reward rose, and reached the promised values."""
    before, after = held_out["before"], held_out["after"]
    rose = after["greedy"] > before["greedy"] and after["sampled"] > before["sampled"]
    if rose and after["greedy"] >= GREEDY_PROMISE and after["sampled"] >= SAMPLED_PROMISE:
        return
    raise Failure(
        "PROMISE_BROKEN",
        f"the held-out reward went from {before['greedy']:.3f} to {after['greedy']:.3f} (greedy) and "
        f"from {before['sampled']:.3f} to {after['sampled']:.3f} (sampled); expected at least "
        f"{GREEDY_PROMISE} and {SAMPLED_PROMISE}",
    )


def check_equal_weights(found: Document) -> None:
    """Raises Failure unless workers were killed and the run still ended in the same weights as the run
    without kills."""
    calm, killed = found["undisturbed_sha256"], found["killed_sha256"]
    if found["kills"] and calm == killed:
        return
    raise Failure(
        "PROMISE_BROKEN",
        f"after {found['kills']} kills the weights are {killed}; without kills they are {calm}",
    )


def _interruption(platform: "DemoTarget", root: Path | None, *, here: bool) -> Interrupted:
    if root is None:
        return Interrupted("interrupted; the demo was stopped and its state deleted")
    removal = f"`headrace demo --remove {root}` removes its files"
    if here:
        return Interrupted(f"interrupted; the server goes on with a run that had begun; {removal}")
    return Interrupted(
        f"interrupted; the demo was stopped. {removal}, and `headrace demo` starts another one. Only a "
        "run that had begun continues, and not the rest of the demo",
        f"{platform.prefix} headrace up --detach",
    )


def _call_without_sigint(stop: Callable[[], None]) -> None:
    """Call `stop` with SIGINT ignored, so that a second Ctrl-C cannot interrupt it."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop()
    signal.signal(signal.SIGINT, previous)


def _print_result(result: Document, platform: "DemoTarget | None") -> None:
    held = result["held_out"]
    rows = [
        (how, f"{held['before'][how]:.3f}", f"{held['after'][how]:.3f}")
        for how in ("greedy", "sampled")
    ]
    print_table("Held-out reward", ("", "before", "after"), rows)
    spent = [
        ("SFT steps", result["sft_steps"]),
        ("GRPO steps", result["steps"]),
        ("wall", f"{result['wall_s']:.0f} s"),
        ("CPU", f"{result['cpu_s']:.0f} s"),
    ]
    print_fields("Spent", spent)
    listed = [(c["ref"], c.get("reward"), c["adapter_sha256"]) for c in result["checkpoints"]]
    print_table("Checkpoints", ("ref", "reward", "weights sha256"), listed)
    if "chaos" in result:
        found = result["chaos"]
        pairs = [
            ("kill -9", found["kills"]),
            ("undisturbed", found["undisturbed_sha256"]),
            ("killed", found["killed_sha256"]),
        ]
        print_fields("With kills", pairs)
    say("Try next:")
    trained = result["checkpoints"][-1]["ref"]
    activate = activation()
    if activate:
        say(f"  {activate}")
    for line in next_commands(platform.prefix if platform else None, trained):
        say(f"  {line}")
    if platform:
        say("What would have happened with another grader, or from the middle with a lower rate?")
        before = f"{activate}; " if activate else ""
        say(f"  {before}{invitation(platform.prefix, trained)}")


def activation() -> str | None:
    """The command that puts `headrace` on the PATH of the shell, or None if it is there. `make demo`
    runs it in an environment that the shell does not know."""
    script = Path(sys.prefix) / "bin" / "activate"
    return f". {script}" if shutil.which("headrace") is None and script.exists() else None


def invitation(prefix: str, trained: str) -> str:
    """One line for a shell that grades the demo's samples with another grader, and forks its run from
    the middle. `trained` is the last checkpoint, like `RUN@100`."""
    from producers.cli.demo.story import NEAR_MISSES

    run, _, last = trained.rpartition("@")
    return (
        f"export {prefix}; headrace up --detach; headrace train regrade {run} --grader {NEAR_MISSES} && "
        f"headrace train fork {run}@{int(last) // 2} --set training.lr=0.0003 --watch"
    )


def next_commands(prefix: str | None, trained: str) -> tuple[str, str, str]:
    """Three commands to try next. `prefix` is None when nothing was kept, and `trained` is the last
    checkpoint, like `RUN@100`."""
    if prefix is None:
        return (
            "headrace demo                   # the same, and keep all state to examine",
            "headrace up --detach            # start your own server",
            "headrace workspace init sums    # make a workspace to edit",
        )
    return (
        f"{prefix} headrace up --detach",
        f"{prefix} headrace train samples {trained.rpartition('@')[0]} --step 1",
        f"{prefix} headrace checkpoint chat {trained} --message 'What is 47 + 38?'",
    )
