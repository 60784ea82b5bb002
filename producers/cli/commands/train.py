"""`headrace train`: the list of its commands, which are in several modules."""

from producers.cli.command_tree import LazyGroup

CLI = "producers.cli.commands."

COMMANDS: dict[str, tuple[str, str]] = {
    "submit": (CLI + "submit:submit", "Start a training run from a TOML file."),
    "fork": (CLI + "submit:fork", "Start a run from the middle of another one."),
    "list": (CLI + "runs:list_", "List the runs of this server, newest first."),
    "info": (CLI + "runs:info", "Show a run: its progress, curves and checkpoints."),
    "watch": (CLI + "runs:watch", "Watch a run until it ends."),
    "logs": (CLI + "runs:logs", "Show the log of a run, oldest line first."),
    "samples": (CLI + "runs:samples", "Show samples: prompts, answers and rewards."),
    "trace": (CLI + "runs:trace", "Show the eight hops of one sample."),
    "compare": (CLI + "runs:compare", "Compare runs: settings, cost and curves."),
    "diff": (CLI + "compare:diff", "Show where two runs part, and in which event."),
    "export": (CLI + "runs:export", "Export the curves of a run to a tracker."),
    "regrade": (CLI + "history.regrades:regrade", "Grade the recorded samples of a run again."),
    "regrades": (CLI + "history.regrades:regrades", "List the regrades of a run."),
    "verify": (CLI + "runs:verify", "Rebuild a run from its log and compare the results."),
    "approve": (CLI + "runs:approve", "Start a run that waits for approval."),
    "pause": (CLI + "runs:pause", "Pause a run after its current step."),
    "resume": (CLI + "runs:resume", "Continue a paused run."),
    "stop": (CLI + "runs:stop", "Stop a run and save a checkpoint of its last step."),
    "tag": (CLI + "upkeep.notes:tag", "Add tags to a run, or remove some."),
    "note": (CLI + "upkeep.notes:note", "Write a note on a run."),
    "share": (CLI + "upkeep.notes:share", "Make a link that shows one run to everyone who has it."),
    "rename": (CLI + "upkeep.retention:rename", "Rename a run."),
    "delete": (CLI + "upkeep.retention:delete", "Delete a run that has ended, permanently."),
    "archive": (
        CLI + "upkeep.retention:archive",
        "Move the history of an ended run into an archive file.",
    ),
    "restore": (CLI + "upkeep.retention:restore", "Restore the history of an archived run."),
}

train = LazyGroup(
    "train",
    commands=COMMANDS,
    help="Training runs: submit, watch, stop, samples, archive and more.",
)
