"""Watches a run, with a live panel on a terminal and one line per step in a pipe.

A run does not depend on its watcher. SIGINT only stops watching, and prints the command to continue.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from producers.cli.client import Client, path_segment
from producers.cli.display.figures import interval_text
from producers.cli.display.output import Document, console, one_line, print_json, say, sparkline
from producers.cli.display.run_view import TYPES, RunView
from producers.cli.display.units import time_left
from producers.cli.errors import Failure, Interrupted
from producers.cli.event_stream import follow_events

if TYPE_CHECKING:
    from rich.live import Live
    from rich.panel import Panel

BAR_WIDTH = 30
PANEL_S, PIPE_S = 5.0, 30.0
"""Seconds without an event after which a panel shows what the run does, and lines in a pipe."""
LONGEST_WARNING = 1000
"""Characters of a warning that are shown. What to do is at its end."""


def watch_run(client: Client, run: str, name: str, *, as_json: bool) -> None:
    """Watch until the run ends. With `as_json`, print only its final state. Raises Failure when the run
    failed, Interrupted on SIGINT."""
    try:
        view = follow_run(client, run, name, quiet=as_json)
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"stopped watching; the run {name} continues", f"headrace train watch {name}"
        ) from error
    if as_json:
        print_json(client.get(f"/runs/{path_segment(run)}"))
    check_result(view, name)


def follow_run(client: Client, run: str, name: str, *, quiet: bool = False) -> RunView:
    """Follow the events of the run until it ends, and draw its progress unless `quiet`. Returns the
    final view. Raises Failure when the server cannot be reached."""
    view = RunView()
    if quiet:
        for event in follow_events(client, run, types=TYPES):
            view.fold(event)
        return view
    events = follow_events(client, run, types=TYPES, on_lost=say_lost)
    if not sys.stdout.isatty():
        with Doings(client, run, lambda doing: say(f"{name}: {doing}"), each_s=PIPE_S) as doings:
            for event in events:
                doings.reset()
                view.fold(event)
                print_event_line(view, name, event)
        return view
    with (
        _live() as live,
        Doings(
            client,
            run,
            lambda doing: live.update(draw_panel(view, name, doing=doing)),
            each_s=PANEL_S,
        ) as doings,
    ):
        for event in events:
            doings.reset()
            view.fold(event)
            live.update(draw_panel(view, name))
    return view


class Doings:
    """Calls `tell` with what a run does or waits for, while none of its events arrives: after `each_s`
    seconds, and then whenever it differs, at most every `each_s` seconds. A thread of its own asks the
    server."""

    def __init__(
        self, client: Client, run: str, tell: Callable[[str], None], *, each_s: float
    ) -> None:
        self._address = client.address
        self._path = f"/runs/{path_segment(run)}"
        self._tell = tell
        self._each_s = each_s
        self._done = threading.Event()
        self._event_at = time.monotonic()
        self._told = ""

    def __enter__(self) -> "Doings":
        threading.Thread(target=self._ask, name="doings", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def reset(self) -> None:
        """Note that an event arrived."""
        self._event_at, self._told = time.monotonic(), ""

    def _ask(self) -> None:
        with Client(self._address) as client:  # the other one may be closed before this thread ends
            while not self._done.wait(self._each_s):
                if time.monotonic() - self._event_at < self._each_s:
                    continue
                try:
                    waits = client.get(self._path).get("waiting_for") or ()
                except Failure:  # `on_lost` tells that the server does not answer
                    continue
                doing = one_line("; ".join(str(wait["message"]) for wait in waits), limit=200)
                if doing and doing != self._told and not self._done.is_set():
                    self._tell(doing)
                    self._told = doing


def say_lost() -> None:
    """Tell a person that the server does not answer, and that nothing has to be done about it."""
    say("the server does not answer; watching goes on when it is back")


def check_result(view: RunView, name: str) -> None:
    """Raises Failure unless the run finished or was stopped by a user."""
    if view.status in ("finished", "stopped"):
        return
    raise Failure(
        "RUN_FAILED",
        f"the run {name} {view.status}: {view.message}; find the cause with "
        f"`headrace train logs {name}` and `headrace train samples {name}`",
    )


@contextmanager
def _live() -> Iterator["Live"]:
    from rich.live import Live

    with Live(console=console(), refresh_per_second=8, transient=False) as live:
        yield live


def print_event_line(view: RunView, name: str, event: Document) -> None:
    """Print a line for one event, if events of its type are printed. `check_result` tells why a run
    failed."""
    kind = event.get("type")
    if kind == "rl.step.settled" and not view.step and view.held_out_losses:
        say(f"{name}: before step 1: {last_step_figures(view)}")
    elif kind == "rl.step.settled" and view.step:
        progress = f"{view.step}/{view.total_steps}{time_left(view.eta_s)}"
        say(f"{name}: step {progress}  {last_step_figures(view)}")
    elif kind == "rl.evaluation.settled" and view.validations:
        step, reward = view.validations[-1]
        say(f"{name}: held-out reward at step {step}: {reward:.3f}{_held_out_interval(view)}")
    elif kind == "rl.checkpoint.settled":
        say(f"{name}: checkpoint {name}@{view.checkpoints[-1]}")
    elif kind == "rl.run.warned":
        say(f"{name}: warning: {one_line(view.warnings[-1], limit=LONGEST_WARNING)}")
    elif kind in ("rl.run.started", "rl.run.paused", "rl.run.resumed") or view.has_ended:
        say(f"{name}: {_status_and_phase(view)}")


def _status_and_phase(view: RunView) -> str:
    is_told = view.has_ended or view.status == view.phase
    return view.status if is_told else f"{view.status} ({view.phase})"


def last_step_figures(view: RunView) -> str:
    """The figures of the last step, as one line of text."""
    shown = []
    if view.rewards:
        shown.append(f"reward {view.rewards[-1]:.3f}")
    if view.losses and (view.is_taught or not view.rewards):
        shown.append(f"loss {view.losses[-1]:.4f}")
    if view.held_out_losses and view.held_out_losses[-1][0] == view.step:
        shown.append(f"held-out loss {view.held_out_losses[-1][1]:.4f}")
    if view.held_out_accuracies and view.held_out_accuracies[-1][0] == view.step:
        shown.append(f"held-out accuracy {view.held_out_accuracies[-1][1]:.3f}")
    if view.pools:
        sizes = (f"{size} {name}" for name, size in view.pools.items())
        shown.append(f"rows {', '.join(sizes)}")
    if view.rates:
        shown.append(f"{view.rates[-1]:,.0f} tokens/s")
    return "  ".join(shown)


def _held_out_interval(view: RunView) -> str:
    """The interval of the newest held-out reward, to follow it; empty without one."""
    ends = interval_text(view.held_out_interval)
    return f"  (95 %: {ends})" if ends else ""


def draw_panel(view: RunView, name: str, *, doing: str = "") -> "Panel":
    """The view as a panel: progress, what the run is `doing`, curve and checkpoints."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    fraction = view.step / view.total_steps if view.total_steps else 0.0
    bar = "█" * round(fraction * BAR_WIDTH) + "░" * (BAR_WIDTH - round(fraction * BAR_WIDTH))
    progress = f"{view.step}/{view.total_steps or '?'}{time_left(view.eta_s)}"
    rows = [
        ("phase", _status_and_phase(view)),
        ("step", f"{bar} {progress}   {last_step_figures(view)}"),
    ]
    if doing:
        rows.append(("now", doing))
    if view.rewards:
        rows.append(
            (
                "reward",
                f"{sparkline(view.rewards)} {min(view.rewards):.2f} … {max(view.rewards):.2f}",
            )
        )
    if view.losses and (view.is_taught or not view.rewards):
        rows.append(
            ("loss", f"{sparkline(view.losses)} {view.losses[0]:.3f} → {view.losses[-1]:.3f}")
        )
    if view.validations:
        held = "  ".join(f"{reward:.2f}@{step}" for step, reward in view.validations[-8:])
        rows.append(("held out", held + _held_out_interval(view)))
    if view.held_out_losses:
        held = "  ".join(f"{loss:.3f}@{step}" for step, loss in view.held_out_losses[-8:])
        rows.append(("held-out loss", held))
    if view.held_out_accuracies:
        held = "  ".join(f"{share:.2f}@{step}" for step, share in view.held_out_accuracies[-8:])
        rows.append(("held-out accuracy", held))
    if view.checkpoints:
        rows.append(("checkpoints", ", ".join(f"@{step}" for step in view.checkpoints[-10:])))
    if view.warnings:
        rows.append(("warning", one_line(view.warnings[-1], limit=LONGEST_WARNING)))
    for label, value in rows:
        grid.add_row(Text(label, style="dim"), Text(value))
    return Panel(grid, title=Text(name), title_align="left", expand=False)
