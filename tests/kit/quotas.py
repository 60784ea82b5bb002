"""Quotas for adapters that a test builds without an application."""

from infra.identity.quota_limits import QuotaLimits
from infra.identity.quotas import Quotas
from infra.spine.ports.clock import SystemClock
from infra.spine.postgres.pool import Database


def quotas(database: Database, **per_organisation: int) -> Quotas:
    """Quotas with these limits for each organisation, and no others."""
    limits = QuotaLimits(
        database, SystemClock(), per_workspace={}, per_key={}, per_organisation=per_organisation
    )
    return Quotas(database, limits)
