"""The help pages explain every command and option, in a line that fits into a list of commands."""

from collections.abc import Iterator

import click
import pytest

from producers.cli.commands.train import COMMANDS as TRAIN
from producers.cli.commands.train import train
from producers.cli.main import cli

COLUMNS = 80


def commands(command: click.Command, context: click.Context) -> Iterator[click.Context]:
    yield context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            inner = click.Context(
                found,
                info_name=name,
                parent=context,
                terminal_width=COLUMNS,
                max_content_width=COLUMNS,
            )
            yield from commands(found, inner)


PAGES = list(commands(cli, click.Context(cli, info_name="headrace", terminal_width=COLUMNS)))


@pytest.mark.parametrize("context", PAGES, ids=lambda context: context.command_path)
def test_every_option_of_a_command_has_a_help_text(context: click.Context) -> None:
    options = [
        each for each in context.command.get_params(context) if isinstance(each, click.Option)
    ]
    assert [option.name for option in options if not option.help] == []


@pytest.mark.parametrize("context", PAGES, ids=lambda context: context.command_path)
def test_no_line_in_a_list_of_commands_is_cut_off(context: click.Context) -> None:
    assert context.command.help
    assert "..." not in context.command.get_help(context).partition("Commands:")[2]


@pytest.mark.parametrize("name", list(TRAIN))
def test_a_list_of_commands_says_what_the_command_itself_says(name: str) -> None:
    """The list is made without importing the command, so its line is written in two places."""
    context = click.Context(train, info_name="train")
    found = train.get_command(context, name)
    assert found is not None
    assert found.help
    assert " ".join(found.help.partition("\n\n")[0].split()) == TRAIN[name][1]
