"""`headrace rollout test`: run a rollout on this machine, without a server."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from producers.cli.checkpoint_files import checkpoint_directory
from producers.cli.command import command
from producers.cli.display.conversation import show_messages, show_output, show_reward
from producers.cli.display.output import Document, print_failure, print_json, say
from producers.cli.errors import Failure, Interrupted
from producers.cli.rollouts.tryout_process import run_tryout
from producers.cli.rollouts.workspace_files import Rollout, file_states, find_rollout
from schemas.errors import Refused

POLL_S = 0.5
"""How often the files are looked at. The standard library cannot wait for a change of them, and a look
takes a few milliseconds."""


@command(None, "test", example="headrace rollout test sums --rows 2")
@click.argument("name", metavar="NAME")
@click.option(
    "--rows",
    default=1,
    show_default=True,
    type=click.IntRange(1, 10_000),
    help="Try this many rows.",
)
@click.option("--first", default=0, type=click.IntRange(0), help="Begin at this row, from 0.")
@click.option(
    "--dataset",
    type=click.Path(path_type=Path),
    help="File with the rows. Default: data/NAME.jsonl of the config's dataset.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="TOML with limits and rewards. Default: configs/training/NAME.toml.",
)
@click.option("--model", metavar="REF", help="Model to sample. Default: the config's model_path.")
@click.option("--provider-model", metavar="NAME", help="Use a provider's model, like openai/gpt-5.")
@click.option("--provider-url", metavar="URL", help="Base URL of an OpenAI-compatible server.")
@click.option("--provider-key-env", metavar="VAR", help="Environment variable with the key.")
@click.option("--watch", is_flag=True, help="Run again whenever a file of the rollout changes.")
def test(
    name: str,
    *,
    rows: int,
    first: int,
    dataset: Path | None,
    config: Path | None,
    model: str | None,
    provider_model: str | None,
    provider_url: str | None,
    provider_key_env: str | None,
    watch: bool,
    as_json: bool,
) -> int:
    """Try a rollout: run its workflow and grader here, confined as in training.

    It needs no server. It prints each turn, tool call, reward, print and traceback. With a provider's
    model no tokens are recorded. The exit code is 1 when a sample failed.
    """
    if model and provider_model:
        raise Failure("USAGE", "--model and --provider-model name two models; give one of them")
    if (provider_url or provider_key_env) and not provider_model:
        raise Failure("USAGE", "--provider-url needs a model; name it with --provider-model")
    rollout = find_rollout(name, config)
    provider = {"name": provider_model, "url": provider_url, "key_env": provider_key_env}
    request: dict[str, object] = {
        **rollout.request(),
        "dataset": str(dataset.resolve()) if dataset else None,
        "rows": rows,
        "first": first,
        "model": _model(model),
        "provider": provider if provider_model else None,
    }
    with checkpoint_directory(_checkpoint(rollout, request)) as directory:
        request["checkpoint"] = directory
        if watch:
            _watch(rollout, request, config, as_json=as_json)
            return 0
        return 1 if _try_once(request, as_json=as_json) else 0


def _checkpoint(rollout: Rollout, request: Mapping[str, object]) -> str:
    """The name of the model that the request samples, or nothing for a provider's."""
    experiment = (rollout.config or {}).get("experiment")
    written = experiment.get("model_path") if isinstance(experiment, dict) else None
    return "" if request["provider"] else str(request["model"] or written or "")


def _model(model: str | None) -> str | None:
    """A model as it is named, and the absolute path of a directory."""
    if model and model.startswith((".", "~")):
        return str(Path(model).expanduser().resolve())
    return model


def _try_once(request: Mapping[str, object], *, as_json: bool) -> int:
    """Try the rows, and print their samples. Returns how many of them failed."""
    samples = []
    for sample in _samples(request, quiet=as_json):
        samples.append(sample)
        if not as_json:
            show_sample(sample)
    failed = sum(1 for sample in samples if sample["error"])
    if as_json:
        print_json({"rows": samples})
        return failed
    say(_summary(samples))
    return failed


def _summary(samples: Sequence[Document]) -> str:
    """How many samples were tried and failed, and their mean reward. As in an evaluation, a sample that
    the policy made fail counts as 0, and other failures are left out."""
    failed = sum(1 for sample in samples if sample["error"])
    counted = [sample for sample in samples if sample["counted_reward"] is not None]
    made_fail = sum(1 for sample in counted if sample["reward"] is None)
    text = f"{len(samples)} tried, {failed} failed"
    if not counted:
        return text
    mean = sum(sample["counted_reward"] for sample in counted) / len(counted)
    note = f" ({made_fail} that the policy made fail count as 0)" if made_fail else ""
    return f"{text}, mean reward {mean:g}{note}"


def _samples(request: Mapping[str, object], *, quiet: bool) -> Iterator[Document]:
    for document in run_tryout(request):
        if "sample" in document:
            yield document["sample"]
        elif not quiet:
            say(str(document.get("note")))


def show_sample(sample: Document) -> None:
    """Print one sample that was tried."""
    say(f"row {sample['row']}:")
    show_messages([*sample["prompt"], *sample["turns"]])
    show_reward(sample)
    show_output(sample)
    if sample.get("grader"):
        show_output(sample["grader"], of=" by the grader")


def _watch(
    rollout: Rollout, request: dict[str, object], config: Path | None, *, as_json: bool
) -> None:
    """Try again after each change, until Ctrl-C."""
    seen = None
    try:
        while True:
            now = file_states(rollout.workspace)
            if now == seen:
                time.sleep(POLL_S)
                continue
            seen = now
            try:
                request |= find_rollout(rollout.name, config).request()
                _try_once(request, as_json=as_json)
            except Refused as error:
                print_failure("FAILED", error.message, error.issues, as_json=as_json)
            if not as_json:
                say("waiting for a change; Ctrl-C ends this")
    except KeyboardInterrupt as error:
        raise Interrupted("stopped watching") from error
