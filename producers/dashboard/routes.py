"""The routes of all pages."""

from producers.dashboard import assets
from producers.dashboard.pages import run, runs, samples, sign_in

ROUTES = [route for part in (assets, sign_in, runs, run, samples) for route in part.ROUTES]
