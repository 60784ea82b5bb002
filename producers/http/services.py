"""The services of the HTTP application. The composition root (`producers/serve.py`) builds it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

from infra.blobs.evaluation_imports import ImportSessions
from infra.blobs.installed import InstalledBlobs
from infra.blobs.staged_uploads import StagedUploads
from infra.blobs.uploads import UploadStore
from infra.http.checked_addresses import CheckedDialling
from infra.http.failed_auth_throttle import FailedAuthThrottle
from infra.identity.api_key_format import digest
from infra.identity.api_keys import ApiKeys
from infra.identity.audit import AuditList
from infra.identity.device_logins import DeviceLoginStore
from infra.identity.invitations import Invitations
from infra.identity.issuing import ApiKeyIssuer
from infra.identity.members import Members
from infra.identity.organisations import Organisations
from infra.identity.people import People
from infra.identity.quota_limits import QuotaLimits
from infra.identity.quotas import Quotas
from infra.identity.recent_api_keys import RecentApiKeys
from infra.identity.recent_workspaces import RecentWorkspaces
from infra.identity.secrets.sealed import Sealer
from infra.identity.secrets.store import PostgresSecrets
from infra.identity.sessions import Sessions
from infra.identity.shares import Shares
from infra.identity.signed_urls import SignedUrls
from infra.model_api.gateway.bytes_in_flight import BytesInFlight
from infra.model_api.serving.client import ServingClient
from infra.model_api.serving.directory import ModelDirectory
from infra.model_api.serving.grants import ServingDoors
from infra.operations.maintenance.alert_targets import ADVICE, AlertTargets
from infra.operations.maintenance.archive import Archives
from infra.operations.maintenance.dependents import Holders
from infra.operations.maintenance.records import Records
from infra.ports.actor import ROOT
from infra.ports.services import Repositories
from infra.readmodel.store import ReadModel
from infra.repositories.forge_connections import ForgeConnections
from infra.repositories.forges.api import ForgeApis
from infra.settings.settings import Settings
from infra.spine.ports.artifacts import Artifacts
from infra.spine.ports.clock import Clock
from infra.spine.ports.effects import Effects
from infra.spine.ports.event_log import EventLog
from infra.spine.postgres.pool import Database
from producers.core.approval import Approvals
from producers.core.connecting import CheckRepository, Connecting
from producers.core.control import Control
from producers.core.datasets.from_run import RecordedDatasets
from producers.core.datasets.recent_statistics import RecentStatistics
from producers.core.datasets.transfers import Transfers
from producers.core.datasets.uploads import DatasetUploads
from producers.core.dead_letters import DeadLetters
from producers.core.device_login import DeviceLogins
from producers.core.evaluations.imports import EvaluationImports
from producers.core.history.forks import Forks
from producers.core.history.notes import Notes
from producers.core.history.regrades import Regrades
from producers.core.history.run_diff import RunDiffs
from producers.core.history.verification import Verifications
from producers.core.lookup import Lookup
from producers.core.models.deployments import DeploymentRequests
from producers.core.models.hub_upload import HubUploadRequests
from producers.core.models.vocabularies import Vocabularies
from producers.core.registry.publishing import ArtifactRegistry
from producers.core.repositories.polling import Ages, Poller, RefSources
from producers.core.retention import Retention
from producers.core.secrets import SecretKeeping
from producers.core.submit import Submitter
from producers.core.validation.synced_rollouts import SyncedRollouts
from producers.core.workspaces import Workspaces
from producers.http.browsers import OIDC_CALLBACK, PageReports
from producers.webhook.endpoint import WebhookEndpoint
from producers.webhook.hooks import ConnectedHooks, RecentHooks
from producers.webhook.journal import DeliveryJournal

if TYPE_CHECKING:
    from infra.identity.oidc.sign_in import OidcSignIns


@dataclass(frozen=True)
class Services:
    """The ports, and the parts of the application core that use them."""

    log: EventLog
    effects: Effects
    database: Database
    blobs: InstalledBlobs
    archives: Archives
    artifacts: Artifacts
    readmodel: ReadModel
    repositories: Repositories
    check_repository: CheckRepository
    forges: ForgeApis
    settings: Settings
    clock: Clock
    slow_poll_s: float = field(default=0.25)
    throttle: FailedAuthThrottle = field(default_factory=FailedAuthThrottle)

    @cached_property
    def api_keys(self) -> ApiKeys:
        return ApiKeys(self.database)

    @cached_property
    def recent_api_keys(self) -> RecentApiKeys:
        return RecentApiKeys(self.api_keys, self.clock)

    @cached_property
    def people(self) -> People:
        return People(self.database)

    @cached_property
    def members(self) -> Members:
        return Members(self.database, self.recent_api_keys.forget, self.quotas)

    @cached_property
    def invitations(self) -> Invitations:
        return Invitations(self.database, self.recent_api_keys, self.clock, self.quotas)

    @cached_property
    def device_logins(self) -> DeviceLogins:
        store = DeviceLoginStore(self.database)
        return DeviceLogins(store, self.people, self.recent_api_keys, self.clock)

    @cached_property
    def organisations(self) -> Organisations:
        return Organisations(self.database, self.quotas)

    @cached_property
    def recent_workspaces(self) -> RecentWorkspaces:
        return RecentWorkspaces(self.organisations.workspaces_of, self.clock)

    @cached_property
    def sessions(self) -> Sessions:
        return Sessions(self.database)

    @cached_property
    def oidc(self) -> "OidcSignIns | None":
        """Sign-in with OpenID Connect; None without its settings. Its libraries are loaded only here."""
        if self.settings.oidc is None:
            return None
        from infra.identity.oidc.sign_in import open_sign_ins

        return open_sign_ins(
            self.settings.oidc,
            self.settings.public_url + OIDC_CALLBACK,
            self.database,
            self.recent_api_keys,
            self.clock,
        )

    @cached_property
    def quotas(self) -> Quotas:
        settings = self.settings
        limits = QuotaLimits(
            self.database,
            self.clock,
            per_workspace=settings.quotas,
            per_key=settings.key_quotas,
            per_organisation=settings.organisation_quotas,
        )
        return Quotas(self.database, limits)

    @cached_property
    def shares(self) -> Shares:
        return Shares(self.database)

    @cached_property
    def signed_urls(self) -> SignedUrls:
        return SignedUrls(self.database, self.sealer, self.clock, self.secrets_of)

    async def secrets_of(self, api_key: str) -> Sequence[bytes]:
        """The SHA-256 of the texts by which an API key (an id) is known now, the present one first.
        Raises TransientError when they cannot be read."""
        if api_key == ROOT:
            return (digest(self.settings.read_api_key() or ""),)
        return await self.recent_api_keys.secrets_of(api_key)

    @cached_property
    def transfers(self) -> Transfers:
        return Transfers(
            UploadStore(self.database, self.blobs),
            self.signed_urls,
            self.quotas,
            blobs=self.blobs,
            public_url=self.settings.public_url,
        )

    @cached_property
    def dataset_uploads(self) -> DatasetUploads:
        return DatasetUploads(
            self.log,
            self.transfers,
            StagedUploads(self.database),
            blobs=self.blobs,
            names=self.readmodel.names,
            scratch=self.settings.home / "uploads",
            clock=self.clock,
        )

    @cached_property
    def recorded_datasets(self) -> RecordedDatasets:
        return RecordedDatasets(
            self.log,
            self.lookup,
            self.readmodel,
            artifacts=self.artifacts,
            blobs=self.blobs,
            quotas=self.quotas,
            scratch=self.settings.home / "uploads",
        )

    @cached_property
    def artifact_registry(self) -> ArtifactRegistry:
        return ArtifactRegistry(
            self.log,
            self.transfers,
            self.readmodel,
            blobs=self.blobs,
            archives=self.archives,
            scratch=self.settings.home / "uploads",
        )

    @cached_property
    def evaluation_imports(self) -> EvaluationImports:
        return EvaluationImports(
            self.log,
            self.transfers,
            ImportSessions(self.database),
            blobs=self.blobs,
            artifacts=self.artifacts,
            names=self.readmodel.names,
        )

    @cached_property
    def page_reports(self) -> PageReports:
        return PageReports()

    @cached_property
    def audit(self) -> AuditList:
        return AuditList(self.database, self.clock, days=self.settings.audit_days)

    @cached_property
    def api_key_issuer(self) -> ApiKeyIssuer:
        return ApiKeyIssuer(self.api_keys, self.recent_api_keys, self.clock)

    @cached_property
    def lookup(self) -> Lookup:
        return Lookup(self.log, self.readmodel.names, curves=self.readmodel.runs)

    @cached_property
    def dataset_statistics(self) -> RecentStatistics:
        return RecentStatistics(self.blobs)

    @cached_property
    def vocabularies(self) -> Vocabularies:
        return Vocabularies(self.lookup, self.artifacts)

    @cached_property
    def workspaces(self) -> Workspaces:
        return Workspaces(
            self.log,
            self.readmodel.names,
            self.repositories,
            homes=self.organisations,
            is_only_one=self.settings.has_one_workspace,
        )

    @cached_property
    def submitter(self) -> Submitter:
        return Submitter(
            self.log,
            self.readmodel.names,
            lookup=self.lookup,
            workspaces=self.workspaces,
            network=self.settings.network,
            secrets=self.secret_store,
            directories=self.settings.model_directories,
            quotas=self.quotas,
            vllm=self.settings.vllm.tuning if self.settings.vllm else None,
            vocabularies=self.vocabularies,
            prices=self.settings.prices,
        )

    @cached_property
    def forks(self) -> Forks:
        return Forks(
            self.log,
            lookup=self.lookup,
            past=self.readmodel.state_at_event,
            pages=self.readmodel.run_pages,
            submitter=self.submitter,
        )

    @cached_property
    def run_diffs(self) -> RunDiffs:
        return RunDiffs(
            self.log, lookup=self.lookup, tables=self.readmodel, artifacts=self.artifacts
        )

    @cached_property
    def sealer(self) -> Sealer:
        return Sealer.of(self.settings)

    @cached_property
    def secret_store(self) -> PostgresSecrets:
        return PostgresSecrets(self.database, self.sealer)

    @cached_property
    def secrets(self) -> SecretKeeping:
        return SecretKeeping(
            self.secret_store,
            self.workspaces,
            connections=self.connections,
            targets=self.alert_targets,
            sealer=self.sealer,
        )

    @cached_property
    def alert_targets(self) -> AlertTargets:
        return AlertTargets(
            self.database,
            self.sealer,
            CheckedDialling(self.settings.git.addresses, advice=ADVICE),
            sends_mail=self.settings.alerts.server is not None,
        )

    @cached_property
    def connections(self) -> ForgeConnections:
        return ForgeConnections(self.database, self.sealer)

    @cached_property
    def rollouts(self) -> SyncedRollouts:
        return SyncedRollouts(self.log, self.readmodel.registry, self.check_repository)

    @cached_property
    def connecting(self) -> Connecting:
        return Connecting(
            self.log,
            self.workspaces,
            self.connections,
            self.forges,
            check=self.check_repository,
            public_url=self.settings.public_url,
            clock=self.clock,
        )

    @cached_property
    def webhooks(self) -> WebhookEndpoint:
        hooks = RecentHooks(ConnectedHooks(self.readmodel.names, self.connections))
        return WebhookEndpoint(hooks, DeliveryJournal(self.log))

    @cached_property
    def poll_ages(self) -> Ages:
        return Ages(self.clock)

    @cached_property
    def poller(self) -> Poller:
        sources = RefSources(
            self.connections.repositories,
            partial(self.repositories.list_refs, background=True),
            self.readmodel.deliveries.known_refs,
        )
        return Poller(
            self.log, sources, self.clock, self.poll_ages, every_s=float(self.settings.poll_s)
        )

    @cached_property
    def verifications(self) -> Verifications:
        return Verifications(self.log, self.lookup)

    @cached_property
    def regrades(self) -> Regrades:
        return Regrades(
            self.log,
            self.lookup,
            self.workspaces,
            artifacts=self.artifacts,
            network=self.settings.network,
        )

    @cached_property
    def dead_letters(self) -> DeadLetters:
        return DeadLetters(self.log, self.readmodel.letters, self.artifacts)

    @cached_property
    def records(self) -> Records:
        return Records(self.database)

    @cached_property
    def retention(self) -> Retention:
        return Retention(
            self.log,
            self.readmodel.names,
            lookup=self.lookup,
            readmodel=self.readmodel,
            archives=self.archives,
            records=self.records,
            holders=Holders(self.database),
        )

    @cached_property
    def control(self) -> Control:
        return Control(self.log, self.lookup, self.secret_store)

    @cached_property
    def notes(self) -> Notes:
        return Notes(self.lookup, self.readmodel.run_notes)

    @cached_property
    def approvals(self) -> Approvals:
        return Approvals(self.log, self.lookup, workspaces=self.workspaces, control=self.control)

    @cached_property
    def deployment_requests(self) -> DeploymentRequests:
        most = self.settings.serving.max_deployments
        return DeploymentRequests(
            self.log, self.lookup, self.readmodel.deployments, most=most, quotas=self.quotas
        )

    @cached_property
    def hub_uploads(self) -> HubUploadRequests:
        return HubUploadRequests(
            self.log,
            self.lookup,
            self.readmodel.runs,
            self.secret_store,
            endpoint=self.settings.hub_endpoint,
        )

    @cached_property
    def model_directory(self) -> ModelDirectory:
        return ModelDirectory(self.readmodel.deployments.active_with_workspaces, self.clock)

    @cached_property
    def inference_bytes(self) -> BytesInFlight:
        return BytesInFlight()

    @cached_property
    def serving(self) -> ServingClient:
        return ServingClient(ServingDoors(self.database))
