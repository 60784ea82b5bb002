"""`headrace`: the command line. It speaks HTTP to a server, and starts one (`headrace up`).

This module holds the tree of commands and the one place where failures become output and an exit
code: 0 done, 1 refused or failed, 2 usage, 130 interrupted. Only click is imported at start.
"""

import sys
from collections.abc import Sequence

import click

from infra.settings.settings import BadSetting
from producers.cli.command_tree import LazyGroup
from producers.cli.display.output import print_failure, print_json, printable
from producers.cli.errors import Interrupted
from schemas.errors import HeadraceError, Refused

CLI = "producers.cli.commands."

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": (
        "producers.cli.demo.command:demo",
        "The whole story on this machine: teach a model, then improve it.",
    ),
    "up": (CLI + "server:up", "Start the server, its workers and its database."),
    "down": (CLI + "server:down", "Stop them, in order."),
    "status": (CLI + "server:status", "What runs, and what waits."),
    "doctor": (CLI + "doctor:doctor", "What is missing on this machine, and how to get it."),
    "worker": (CLI + "server:worker", "Run the named consumers only."),
    "workspace": (
        CLI + "workspace:workspace",
        "Repositories with rollouts: add, list, info, init.",
    ),
    "dataset": (
        CLI + "dataset:dataset",
        "Datasets: upload, list, info, preview, download, validate.",
    ),
    "train": (
        CLI + "retention:train",
        "Training runs: submit, watch, stop, samples, archive and more.",
    ),
    "eval": (
        CLI + "evaluation:evaluation",
        "Evaluations: submit, list, info, logs, stop, download.",
    ),
    "events": (CLI + "events:events", "The event log of a run."),
    "checkpoint": (
        CLI + "checkpoint:checkpoint",
        "Checkpoints: list, info, download, merge, chat.",
    ),
    "dlq": (CLI + "dlq:dlq", "Dead letters: list, show, redrive."),
    "backup": (CLI + "backup:backup", "Copy database and blobs, consistent with each other."),
    "restore": (CLI + "backup:restore", "Bring a backup into an empty place."),
    "rebuild": (CLI + "rebuild:rebuild", "Build the read model again from the event log."),
    "gc": (CLI + "retention:gc", "Archive runs that ended long ago, collect what nothing names."),
    "models": (CLI + "models:models", "The base models known here, and the scratch: shapes."),
}


def _print_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:  # noqa: FBT001 - click's own shape
    if not wanted:
        return
    from importlib.metadata import version

    if "--json" in sys.argv:
        print_json({"version": version("headrace")})
    else:
        click.echo(f"headrace {version('headrace')}")
    ctx.exit()


VERSION = click.Option(
    ["--version"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version.",
)

cli = LazyGroup(
    "headrace",
    commands=COMMANDS,
    options=(VERSION,),
    help="""Post-train language models with reinforcement learning: a commit and a TOML become a
    better model.

    \b
    Example:
      headrace up --detach
      headrace workspace init sums && cd sums
      headrace train submit configs/training/sft.toml --watch
    """,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    try:
        done = cli.main(args=arguments, prog_name="headrace", standalone_mode=False)
    except click.UsageError as error:
        return _print_usage_error(error, as_json=as_json)
    except Refused as error:
        print_failure(error.code, error.message, error.issues, as_json=as_json)
        return 1
    except (HeadraceError, BadSetting) as error:
        code = "VALIDATION" if isinstance(error, BadSetting) else "FAILED"
        print_failure(code, str(error), as_json=as_json)
        return 1
    except (Interrupted, KeyboardInterrupt, click.Abort) as error:
        return _print_interruption(error, as_json=as_json)
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:
        print_failure("FAILED", _describe_os_error(error), as_json=as_json)
        return 1
    return done if isinstance(done, int) else 0


def _print_usage_error(error: click.UsageError, *, as_json: bool) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
    elif as_json:
        print_failure("USAGE", error.format_message(), as_json=True)
    else:
        error.show()
    return 2


def _describe_os_error(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def _print_interruption(error: BaseException, *, as_json: bool) -> int:
    told = error if isinstance(error, Interrupted) else Interrupted("interrupted")
    message = told.message
    if told.come_back:
        message += f"; come back with: {told.come_back}"
    if as_json:
        print_failure("INTERRUPTED", message, as_json=True)
    else:  # what was asked for: no error
        sys.stderr.write(f"{printable(message)}\n")
    return 130


if __name__ == "__main__":
    sys.exit(main())
