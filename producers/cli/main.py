"""`headrace`, the command line. It talks to a server over HTTP, and can start one (`headrace up`).

This module holds the tree of commands. It is also the only place that turns failures into output and an
exit code: 0 for success, 1 for a refusal or a failure, 2 for wrong usage, 130 for an interruption. Only
click is imported at start.
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
        "Train a small model on this machine from start to finish.",
    ),
    "up": (CLI + "server:up", "Start the server, its workers and its database."),
    "down": (CLI + "server:down", "Stop the server, its workers and its database."),
    "open": (CLI + "server:open_", "Print a new link that opens the dashboard."),
    "status": (CLI + "server:status", "Show processes, workers, runs and waiting work."),
    "doctor": (CLI + "doctor:doctor", "Check this machine and say how to fix what is missing."),
    "worker": (CLI + "server:worker", "Run selected consumers in this process."),
    "workspace": (
        CLI + "workspaces.workspace:workspace",
        "Repositories with rollouts: add, connect, list, info and more.",
    ),
    "rollout": (
        CLI + "workspaces.rollout:rollout",
        "Rollouts: make, list, check and try them, without a server.",
    ),
    "dataset": (
        CLI + "dataset:dataset",
        "Datasets: upload, list, preview, download and more.",
    ),
    "artifact": (
        CLI + "models.artifact:artifact",
        "Capabilities, tasks and models in versions: push, list, pull and more.",
    ),
    "secret": (
        CLI + "access.secrets:secret",
        "Secrets for user code: set, list, delete, rotate-key.",
    ),
    "train": (
        CLI + "train:train",
        "Training runs: submit, watch, stop, samples, archive and more.",
    ),
    "eval": (
        CLI + "evaluations.evaluation:evaluation",
        "Evaluations: submit, list, info, retry, compare and more.",
    ),
    "cost": (
        CLI + "upkeep.cost:cost",
        "Show what runs, workspaces and users cost.",
    ),
    "events": (CLI + "events:events", "Show the event log of a run."),
    "checkpoint": (
        CLI + "checkpoint:checkpoint",
        "Checkpoints: list, info, compare, download, merge, chat.",
    ),
    "model": (
        CLI + "models.model:model",
        "Models: fetch, deploy, undeploy, list, info, upload.",
    ),
    "org": (
        CLI + "access.organisation:organisation",
        "Organisations: create, list, show, quotas, rename.",
    ),
    "login": (CLI + "access.login:login", "Sign in, and store an API key of yours."),
    "logout": (CLI + "access.login:logout", "Revoke and forget the stored API key."),
    "whoami": (CLI + "access.login:whoami", "Show to whom your API key belongs."),
    "member": (
        CLI + "access.people:member",
        "Members of an organisation: list, invite, role, remove and more.",
    ),
    "person": (CLI + "access.people:person", "People of the installation: list, remove."),
    "key": (CLI + "access.api_key:api_key", "API keys: create, list, rotate, revoke."),
    "sessions": (
        CLI + "access.sessions:sessions",
        "Open sessions of the dashboard: list, end.",
    ),
    "audit": (CLI + "access.audit:audit", "Show who asked for what, and what was refused."),
    "dlq": (CLI + "repair.dlq:dlq", "Dead letters: list, show, redrive."),
    "backup": (CLI + "backup:backup", "Copy the database and its blobs as of one moment."),
    "restore": (CLI + "backup:restore", "Restore a backup into an empty installation."),
    "rebuild": (CLI + "repair.rebuild:rebuild", "Rebuild the read model from the event log."),
    "gc": (CLI + "upkeep.retention:gc", "Archive old runs and delete data that is no longer used."),
    "models": (
        CLI + "models.model:models",
        "List base models and scratch: models to train from.",
    ),
}

OLD_NAMES = {"token": "key"}
"""Former names of commands, for one release."""


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
    help="Print the version and exit.",
)

cli = LazyGroup(
    "headrace",
    commands=COMMANDS,
    old_names=OLD_NAMES,
    options=(VERSION,),
    help="""Post-train language models with reinforcement learning. A git commit and a TOML file
    become a trained model.

    \b
    Example:
      headrace up --detach
      headrace workspace init sums && cd sums
      headrace train submit configs/training/sft.toml --watch
    """,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in arguments
    try:
        result = cli.main(args=arguments, prog_name="headrace", standalone_mode=False)
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
    return result if isinstance(result, int) else 0


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
    interruption = error if isinstance(error, Interrupted) else Interrupted("interrupted")
    message = interruption.message
    if interruption.resume_command:
        message += f"; resume with: {interruption.resume_command}"
    if as_json:
        print_failure("INTERRUPTED", message, as_json=True)
    else:  # the user asked for it, so this is not an error
        sys.stderr.write(f"{printable(message)}\n")
    return 130


if __name__ == "__main__":
    sys.exit(main())
