"""`headrace rollout`: the list of its commands."""

from producers.cli.command_tree import LazyGroup

CLI = "producers.cli.commands.workspaces."

COMMANDS: dict[str, tuple[str, str]] = {
    "init": (CLI + "rollout_files:init", "Make a new rollout in this workspace."),
    "list": (CLI + "rollout_files:list_", "List the rollouts of this workspace."),
    "validate": (CLI + "rollout_files:validate", "Check a rollout: code, packages, config, data."),
    "test": (CLI + "try_out:test", "Try a rollout on this machine, without a server."),
}

rollout = LazyGroup(
    "rollout",
    commands=COMMANDS,
    help="Rollouts of the workspace around this directory: init, list, validate, test.",
)
