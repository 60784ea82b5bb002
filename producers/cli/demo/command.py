"""`headrace demo`: the whole story on this machine, with a verdict.

A platform of its own (home, database, server, worker) is started beside whatever else runs here and
stopped at the end. The model is made from nothing and taught by demonstrations (SFT), measured on
held-out questions, improved by reinforcement learning, and measured again.
"""

import itertools
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import click

from producers.cli.command_tree import command
from producers.cli.display.output import Document, print_fields, print_json, print_table, say
from producers.cli.errors import Failure, Interrupted

if TYPE_CHECKING:
    from producers.cli.demo.platform import DemoTarget

GREEDY_PROMISE = 0.9
SAMPLED_PROMISE = 0.75
DEFAULT_DIRECTORY = "headrace-demo"


@command(None, "demo", example="headrace demo --keep ./demo")
@click.option(
    "--keep",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where all state goes, an empty or new directory.  [default: ./headrace-demo]",
)
@click.option("--discard", is_flag=True, help="Remove all state at the end.")
@click.option(
    "--remove",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Only remove what a demo kept there, its database too.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of data, model and training.")
@click.option("--steps", default=100, show_default=True, help="Steps of reinforcement learning.")
@click.option(
    "--grader",
    type=click.Choice(["check", "random"]),
    default="check",
    help="What pays in training. random: a control experiment, in which nothing should be learned.",
)
@click.option(
    "--chaos",
    is_flag=True,
    help="Train a second time while workers are killed: it must end in the same bits.",
)
@click.option(
    "--here", is_flag=True, help="On the server that runs already, instead of one of its own."
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
) -> None:
    """Make a language model from nothing, then improve it by reinforcement learning; about five
    minutes on two cores.

    Exits 1 unless the held-out reward rose as promised: to 0.9 or more greedy, 0.75 or more sampled.
    Everything stays in ./headrace-demo to look at, unless --discard is given.
    """
    from producers.cli.demo.platform import DemoPlatform, RunningPlatform
    from producers.cli.demo.story import Story

    if remove is not None:
        _remove(remove, as_json=as_json)
        return
    started = time.monotonic()
    keep = _directory_to_keep(keep, discard=discard)
    root = (keep or Path(tempfile.mkdtemp(prefix="headrace-demo-"))).resolve()
    platform: DemoTarget = RunningPlatform() if here else DemoPlatform(root)
    try:
        client = platform.start()
        mark = uuid4().hex[:6] if here else ""
        story = Story(client, root / "workspace", home=platform.home, quiet=as_json, mark=mark)
        told = story.tell(seed=seed, steps=steps, random_pay=grader == "random", chaos=chaos)
    except (KeyboardInterrupt, Interrupted) as error:
        raise _interruption(platform, keep) from error
    finally:
        _call_without_sigint(platform.stop)
        if keep is None:
            platform.remove_database()
            shutil.rmtree(root, ignore_errors=True)
    result: Document = {
        **told,
        "wall_s": round(time.monotonic() - started, 1),
        "cpu_s": cpu_seconds_used(),
    }
    if as_json:
        print_json(result)
    else:
        _print_result(result, platform if keep else None)
        if keep is not None and not here:
            say(f"All is kept in {root}; remove it with: headrace demo --remove {root}")
    check_promise(result["held_out"])
    if chaos:
        check_equal_weights(result["chaos"])


def _directory_to_keep(keep: Path | None, *, discard: bool) -> Path | None:
    """Where state is kept; None: nowhere. Raises Failure when that is in use, UsageError when both
    are asked for."""
    if keep is not None:
        if discard:
            raise click.UsageError("give either --keep or --discard")
        if keep.exists() and any(keep.iterdir()):
            raise Failure("CONFLICT", f"{keep} is not empty; name a new directory")
        return keep
    if discard:
        return None
    others = (f"{DEFAULT_DIRECTORY}-{n}" for n in itertools.count(2))
    return next(
        Path(name)
        for name in itertools.chain([DEFAULT_DIRECTORY], others)
        if not Path(name).exists()
    )


def _remove(directory: Path, *, as_json: bool) -> None:
    """Remove what a demo kept. Raises Failure where none is, or one that still runs."""
    from infra.local.home import owner
    from producers.cli.demo.platform import DemoPlatform

    root = directory.resolve()
    platform = DemoPlatform(root)
    if not (root / "workspace").is_dir() or not platform.home.is_dir():
        raise Failure("NOT_FOUND", f"{directory} holds no demo (no home/ and workspace/ in it)")
    if owner(platform.home) is not None:
        command = f"HEADRACE_HOME={platform.home} headrace down"
        raise Failure("CONFLICT", f"the demo in {directory} still runs; stop it with: {command}")
    platform.remove_database()
    shutil.rmtree(root)
    if as_json:
        print_json({"removed": str(root)})
    else:
        say(f"removed {directory}")


def cpu_seconds_used() -> float:
    """CPU seconds of this process and of all it started, once they have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return round(sum(u.ru_utime + u.ru_stime for u in used), 1)


def check_promise(held_out: Document) -> None:
    """Raises Failure unless the held-out reward rose, and to what was promised."""
    before, after = held_out["before"], held_out["after"]
    rose = after["greedy"] > before["greedy"] and after["sampled"] > before["sampled"]
    if rose and after["greedy"] >= GREEDY_PROMISE and after["sampled"] >= SAMPLED_PROMISE:
        return
    raise Failure(
        "PROMISE_BROKEN",
        f"the held-out reward went from {before['greedy']:.3f} to {after['greedy']:.3f} greedy and "
        f"from {before['sampled']:.3f} to {after['sampled']:.3f} sampled; promised were "
        f"{GREEDY_PROMISE} and {SAMPLED_PROMISE}",
    )


def check_equal_weights(found: Document) -> None:
    """Raises Failure unless workers died and the run ended in the bits of its undisturbed twin."""
    calm, killed = found["undisturbed_sha256"], found["killed_sha256"]
    if found["kills"] and calm == killed:
        return
    raise Failure(
        "PROMISE_BROKEN",
        f"after {found['kills']} kills the weights are {killed}, undisturbed they were {calm}",
    )


def _interruption(platform: "DemoTarget", keep: Path | None) -> Interrupted:
    if keep is None:
        return Interrupted("interrupted; the demo was stopped and its state removed")
    return Interrupted(
        "interrupted; the demo was stopped, its runs go on where they were",
        f"{platform.prefix} headrace up --detach",
    )


def _call_without_sigint(stop: Callable[[], None]) -> None:
    """Stop in order, even while someone leans on Ctrl-C."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop()
    signal.signal(signal.SIGINT, former)


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
        print_fields("Under fire", pairs)
    say("Try next:")
    for line in next_commands(platform.prefix if platform else None):
        say(f"  {line}")


def next_commands(prefix: str | None) -> tuple[str, str, str]:
    """Three commands to go on with; `prefix` None: nothing was kept."""
    if prefix is None:
        return (
            "headrace demo                   # the same, and everything stays for you to look at",
            "headrace up --detach            # a server of your own",
            "headrace workspace init sums    # a workspace to change",
        )
    return (
        f"{prefix} headrace up --detach",
        f"{prefix} headrace train samples arithmetic-grpo --step 1",
        f"{prefix} headrace checkpoint chat arithmetic-grpo@last --message 'What is 47 + 38?'",
    )
