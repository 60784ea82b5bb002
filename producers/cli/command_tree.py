"""The building blocks of the command tree: groups that import a command only when it is used, and the
`command` decorator, which adds `--json` to every command.

`headrace --help` must be fast, so the help of a group is written where the group is defined, and only
click is imported to print it.
"""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

import click

P = ParamSpec("P")
R = TypeVar("R")

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}

RUN = click.argument("run", metavar="RUN")
LIMIT = click.option("--limit", default=50, show_default=True, help="Show at most this many.")
OFFSET = click.option("--offset", default=0, show_default=True, help="Skip this many first.")


class LazyGroup(click.Group):
    """A group whose commands live in other modules: name -> ("module:attribute", one line)."""

    def __init__(
        self,
        name: str,
        *,
        commands: Mapping[str, tuple[str, str]],
        help: str,
        options: Sequence[click.Option] = (),
    ) -> None:
        super().__init__(name, help=help, params=list(options), context_settings=HELP_OPTIONS)
        self._lazy = dict(commands)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command; None when no command has this name."""
        if cmd_name not in self._lazy:
            return None
        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        found: click.Command = getattr(importlib.import_module(module), attribute)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Like click's, but suggest names of commands that are not imported too. Raises
        NoSuchCommand."""
        try:
            return super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand as error:
            raise click.exceptions.NoSuchCommand(
                error.command_name, possibilities=self._lazy, ctx=ctx
            ) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._lazy.items()])


class Group(click.Group):
    """A group defined in one module: it lists its commands in the order of the source."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def group(name: str, help: str) -> Group:
    """Make a command group that prints its help when it is called without a command."""
    return Group(name, help=help, context_settings=HELP_OPTIONS)


def command(
    parent: click.Group | None, name: str, *, example: str
) -> Callable[[Callable[P, R]], click.Command]:
    """Register a function as a command with `--json` (passed as `as_json`) and an example."""

    def register(function: Callable[P, R]) -> click.Command:
        @functools.wraps(function)
        def body(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(*args, **kwargs)

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
