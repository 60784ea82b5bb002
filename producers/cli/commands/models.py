"""`headrace models`: what a run may start from."""

from producers.cli.client import Client
from producers.cli.command_tree import command
from producers.cli.display.output import print_json, print_table


@command(None, "models", example="headrace models --json")
def models(*, as_json: bool) -> None:
    """The base models known here, and the scratch: shapes (made from a seed, nothing to download).

    experiment.model_path also takes any hub id, a local directory, or a checkpoint
    RUN@STEP, RUN@last, RUN@best.
    """
    with Client() as client:
        answer = client.get("/models")
    if as_json:
        print_json(answer)
        return
    rows = [(m.get("name"), m.get("kind"), m.get("parameters")) for m in answer["models"]]
    print_table("Models", ("name", "kind", "parameters"), rows)
