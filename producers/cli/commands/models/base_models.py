"""`headrace models`: the models that a run can start from."""

from producers.cli.client import Client
from producers.cli.command_tree import command
from producers.cli.display.output import print_json, print_table


@command(None, "models", example="headrace models --json")
def models(*, as_json: bool) -> None:
    """List base models and scratch: models, which are made from a seed without a download.

    experiment.model_path also accepts any hub id, a local directory, or a checkpoint: RUN@STEP, RUN@last
    or RUN@best.
    """
    with Client() as client:
        answer = client.get("/models")
    if as_json:
        print_json(answer)
        return
    rows = [(m.get("name"), m.get("kind"), m.get("parameters")) for m in answer["models"]]
    print_table("Models", ("name", "kind", "parameters"), rows)
