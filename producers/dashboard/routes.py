"""The routes of all pages."""

from producers.dashboard import assets, live, reports
from producers.dashboard.pages import (
    costs,
    datasets,
    deployments,
    evaluation_samples,
    evaluations,
    health,
    history,
    new_evaluation,
    new_run,
    platform,
    playground,
    run,
    runs,
    samples,
    shares,
    timeline,
    workspaces,
)
from producers.dashboard.pages.access import api_keys, device, joining, members, oidc, sign_in
from producers.dashboard.pages.comparisons import compare, forks, regrades, row_changes
from producers.dashboard.routing import MissingPage

PAGES = (
    assets,
    reports,
    sign_in,
    oidc,
    joining,
    device,
    members,
    api_keys,
    runs,
    costs,
    run,
    live,
    samples,
    shares,
    forks,
    health,
    regrades,
    history,
    timeline,
    compare,
    row_changes,
    new_run,
    new_evaluation,
    evaluations,
    evaluation_samples,
    datasets,
    workspaces,
    deployments,
    playground,
    platform,
)

ROUTES = [
    *(route for part in PAGES for route in part.ROUTES),
    MissingPage(),
]
