"""The `command` decorator: what all commands have in common.

A command function returns what it shows, as an Output. Here it gets its client and its `--json`, and the
Output is printed. Failures are printed by `producers/cli/main.py`.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack

import click

from producers.cli.command_tree import HELP_OPTIONS
from producers.cli.display.output import Output


def command(
    parent: click.Group | None, name: str, *, example: str
) -> Callable[[Callable[..., Output | int | None]], click.Command]:
    """Register a function as a command with `--json` and an example.

    If the function has a parameter `client`, it gets a client of the server that is open until the
    Output is printed; if it has a parameter `as_json`, it gets whether `--json` was given. It may return
    an exit code instead of an Output, when it has printed everything itself.
    """

    def register(function: Callable[..., Output | int | None]) -> click.Command:
        wanted = inspect.signature(function).parameters

        @functools.wraps(function)
        def body(*, as_json: bool, **options: object) -> int | None:
            if "as_json" in wanted:
                options["as_json"] = as_json
            with ExitStack() as stack:
                if "client" in wanted:
                    from producers.cli.client import Client  # its import takes longer than a help

                    options["client"] = stack.enter_context(Client())
                answer = function(**options)
                return answer.print(as_json=as_json) if isinstance(answer, Output) else answer

        built = click.command(name, context_settings=HELP_OPTIONS, epilog=f"Example:  {example}")(
            body
        )
        built.params.append(
            click.Option(["--json", "as_json"], is_flag=True, help="Print JSON for programs.")
        )
        if parent is not None:
            parent.add_command(built)
        return built

    return register
