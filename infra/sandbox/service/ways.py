"""Chooses how this process reaches a sandbox service."""

from infra.sandbox.service.child import ChildService
from infra.sandbox.service.client import Service
from infra.sandbox.service.remote import RemoteService
from infra.settings.settings import Settings


def service_of(settings: Settings) -> Service:
    """Return the way to the service that HEADRACE_SANDBOX_URL names, or to a child of this process."""
    address = settings.sandbox_service
    if address is None:
        return ChildService(settings.sandbox, environments=settings.packages.directory)
    return RemoteService(address.host, address.port, address.key)
