"""The building blocks of the command tree: groups that import a command only when it is used, and the
arguments and options that many commands have.

`headrace --help` must be fast, so the help of a group is written where the group is defined, and only
click is imported to print it.
"""

import importlib
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import click

from producers.cli.errors import Failure

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}

RUN = click.argument("run", metavar="RUN")
LIMIT = click.option("--limit", default=50, show_default=True, help="Show at most this many.")
FEW = click.option(
    "--limit", default=20, show_default=True, type=click.IntRange(1), help="Show at most this many."
)
SECRETS_FILE = click.option(
    "--secrets-file",
    metavar="FILE",
    help="Values of required secrets for this alone: lines NAME=value, or - for stdin.",
)
OFFSET = click.option("--offset", default=0, show_default=True, help="Skip this many first.")

AGE = re.compile(r"([0-9]{1,6})([smhdw])")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}


class LazyGroup(click.Group):
    """A group whose commands live in other modules: name -> ("module:attribute", one line). `old_names`
    are former names of commands, which still work and are in no help."""

    def __init__(
        self,
        name: str,
        *,
        commands: Mapping[str, tuple[str, str]],
        help: str,
        options: Sequence[click.Option] = (),
        old_names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(name, help=help, params=list(options), context_settings=HELP_OPTIONS)
        self._lazy = dict(commands)
        self._old_names = old_names

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command; None when no command has this name."""
        name = self._old_names.get(cmd_name, cmd_name)
        if name not in self._lazy:
            return None
        module, _, attribute = self._lazy[name][0].partition(":")
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
    """A group defined in one module: it lists its commands in the order of the source. `old_names` are
    as those of a LazyGroup."""

    old_names: Mapping[str, str] = MappingProxyType({})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, self.old_names.get(cmd_name, cmd_name))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def group(name: str, help: str, *, old_names: Mapping[str, str] = MappingProxyType({})) -> Group:
    """Make a command group that prints its help when it is called without a command."""
    found = Group(name, help=help, context_settings=HELP_OPTIONS)
    found.old_names = old_names
    return found


def parse_age_s(text: str, *, option: str = "--older-than") -> int:
    """An age such as `30d`, in seconds. Raises Failure when the text is not an age."""
    parts = AGE.fullmatch(text)
    if parts is None:
        raise Failure(
            "INVALID_OPTION",
            f"{option} {text!r} is not an age; write a whole number and s, m, h, d or w, like 30d",
        )
    return int(parts[1]) * SECONDS[parts[2]]
