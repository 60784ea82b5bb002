"""The routes of all pages."""

from producers.dashboard import assets, live
from producers.dashboard.pages import (
    compare,
    datasets,
    evaluations,
    history,
    new_run,
    platform,
    run,
    runs,
    samples,
    sign_in,
    workspaces,
)

PAGES = (
    assets,
    sign_in,
    runs,
    run,
    live,
    samples,
    history,
    compare,
    new_run,
    evaluations,
    datasets,
    workspaces,
    platform,
)

ROUTES = [route for part in PAGES for route in part.ROUTES]
