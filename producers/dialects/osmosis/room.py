"""The dialect as serve mounts it. Each module of this room has the routes of one group of the client's
commands."""

from functools import partial

from infra.settings.settings import Settings
from producers.dialects.osmosis import (
    datasets,
    eval_files,
    evaluations,
    identity,
    imports,
    metrics,
    models,
    rollouts,
    secrets,
    training,
    workspaces,
)
from producers.dialects.osmosis.client_form import ClientForm
from producers.http.app import Dialect

RESOURCES = (
    identity,
    workspaces,
    training,
    metrics,
    secrets,
    rollouts,
    models,
    evaluations,
    eval_files,
    imports,
    datasets,
)


def osmosis(settings: Settings) -> Dialect:
    """The routes of the client, and the form of its responses."""
    return Dialect(
        routes=[route for resource in RESOURCES for route in resource.ROUTES],
        in_form=partial(ClientForm, least_version=settings.osmosis_oldest),
    )
