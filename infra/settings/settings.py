"""Settings: the environment, read once into a frozen value. Imports nothing heavy.

A bad value stops the process at start with one line that names the variable, its value, and the values
that are allowed. A value whose feature is not built yet is refused by name.
"""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from urllib.parse import unquote, urlsplit

from infra.settings import capacity, network_policy, prices, quotas
from infra.settings.alerts import AlertSettings, BadAlertSetting
from infra.settings.git import THIS_MACHINE, GitSettings
from infra.settings.kafka import KafkaSettings
from infra.settings.model_directories import ModelDirectories
from infra.settings.network_policy import NetworkPolicy
from infra.settings.oidc import OidcSettings
from infra.settings.packages import PackageSettings
from infra.settings.s3 import S3Place, is_public_endpoint
from infra.settings.sandbox_level import TRUSTED
from infra.settings.sandbox_limits import SandboxLimits, load_sandbox_limits
from infra.settings.sandbox_service import SandboxAddress
from infra.settings.secret_key import KeySource, load_sources
from infra.settings.serving import ServingSettings
from infra.settings.vllm import BadValue, Tuning, VllmLaunch, read_tuning
from schemas.secrets.redact import redact_setting

HUB = "https://huggingface.co"
"""The model hub, unless HF_ENDPOINT names another one."""

VERSION = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6}){1,2}")

Network = IPv4Network | IPv6Network


class BadSetting(ValueError):
    """A variable holds a value that it may not hold. The message is the line to print."""


@dataclass(frozen=True, slots=True)
class DatabaseLimits:
    """A process's limits on the database: the connections in each of its two pools, how long a
    statement may run, and how long a transaction may idle (an idle one stalls the log's horizon)."""

    pool: int = 6
    statement_s: float = 20.0
    idle_in_transaction_s: float = 30.0


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """The vLLM servers that sample versions of `tuning`. The directory `adapters` has the same path for
    them as for us. `server` is the one that the supervisor starts itself, or None."""

    urls: tuple[str, ...]
    adapters: Path
    server: VllmLaunch | None = None
    tuning: Tuning = "lora"
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Settings:
    """How this process runs. Without `database_url` the supervisor runs an embedded Postgres.
    Without `kafka` the bus tails the event log, and without `vllm` the torch engine samples.
    Without `retention_days` no run is archived automatically, without `evaluation_days` and
    `record_days` no record is removed, and without `secret_key` secrets are sealed with the key
    file of the home. `old_secret_keys` open what they sealed before. `capacity` has the lanes whose
    capacity the operator sets, `run_capacity` those where one run has a limit, `quotas` the limits
    of each workspace, `organisation_quotas` those of each organisation, and `key_quotas` those of
    each API key. Without `sandbox_service` each process that needs one starts its own."""

    home: Path
    url: str
    public_url: str
    api_key: str | None = field(repr=False)
    metrics_key: str | None = field(repr=False)
    trusted_proxies: tuple[Network, ...]
    audit_days: int
    secret_key: KeySource | None = field(repr=False)
    old_secret_keys: tuple[KeySource, ...] = field(repr=False)
    database_url: str | None = field(repr=False)
    database: DatabaseLimits
    kafka: KafkaSettings | None
    blobs: str
    s3_endpoint: str | None
    s3_public_endpoint: str | None
    vllm: VllmSettings | None
    serving: ServingSettings
    hub_endpoint: str
    model_directories: ModelDirectories
    sandbox: str
    sandbox_limits: SandboxLimits
    sandbox_service: SandboxAddress | None
    network: NetworkPolicy
    workers: str
    capacity: Mapping[str, int]
    run_capacity: Mapping[str, int]
    quotas: Mapping[str, int]
    organisation_quotas: Mapping[str, int]
    key_quotas: Mapping[str, int]
    prices: Mapping[str, float]
    retention_days: int | None
    evaluation_days: int | None
    record_days: int | None
    poll_s: int
    alerts: AlertSettings
    git: GitSettings
    packages: PackageSettings
    oidc: OidcSettings | None
    osmosis_api: bool
    osmosis_oldest: str | None
    failpoint: str | None
    telemetry: bool
    in_cluster: bool

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> "Settings":
        """Read the environment. Raises BadSetting."""
        home = _home(environ)
        secret_key, old_secret_keys = _secret_keys(environ)
        return cls(
            home=home,
            url=_url(environ),
            public_url=_public_url(environ),
            api_key=_api_key(environ),
            metrics_key=environ.get("HEADRACE_METRICS_KEY") or None,
            trusted_proxies=_trusted_proxies(environ),
            audit_days=_number(environ, "HEADRACE_AUDIT_DAYS", 90, 1, 36500),
            secret_key=secret_key,
            old_secret_keys=old_secret_keys,
            database_url=_database(environ),
            database=DatabaseLimits(
                pool=_number(environ, "HEADRACE_DATABASE_POOL", 6, 1, 500),
                statement_s=_number(environ, "HEADRACE_DATABASE_STATEMENT_S", 20, 1, 3600),
                idle_in_transaction_s=_number(environ, "HEADRACE_DATABASE_IDLE_S", 30, 1, 3600),
            ),
            kafka=_kafka(environ),
            blobs=_blobs(environ, home),
            s3_endpoint=_s3_endpoint(environ),
            s3_public_endpoint=_s3_public_endpoint(environ),
            vllm=_vllm(environ, home),
            serving=_serving(environ),
            hub_endpoint=(environ.get("HF_ENDPOINT") or HUB).rstrip("/"),
            model_directories=_model_directories(environ),
            sandbox=sandbox_level(environ),
            sandbox_limits=_sandbox_limits(environ),
            sandbox_service=_sandbox_service(environ),
            network=_network(environ),
            workers=_one_of(environ, "HEADRACE_WORKERS", ("one", "two", "each")),
            capacity=_capacity(environ, capacity.VARIABLE),
            run_capacity=_capacity(environ, capacity.RUN_VARIABLE),
            quotas=_quotas(environ, quotas.VARIABLE, tuple(quotas.QUOTAS)),
            organisation_quotas=_quotas(
                environ, quotas.ORGANISATION_VARIABLE, tuple(quotas.ORGANISATION_QUOTAS)
            ),
            key_quotas=_quotas(environ, quotas.KEY_VARIABLE, quotas.KEY_QUOTAS),
            prices=_prices(environ),
            retention_days=_number(environ, "HEADRACE_RETENTION_DAYS", 0, 0, 36500) or None,
            evaluation_days=_number(environ, "HEADRACE_EVALUATION_DAYS", 0, 0, 36500) or None,
            record_days=_number(environ, "HEADRACE_RECORD_DAYS", 90, 0, 36500) or None,
            poll_s=_number(environ, "HEADRACE_POLL_S", 60, 0, 86400),
            alerts=_alerts(environ),
            git=_git(environ),
            packages=_packages(environ),
            oidc=_oidc(environ),
            osmosis_api=_one_of(environ, "HEADRACE_OSMOSIS_API", ("on", "off")) == "on",
            osmosis_oldest=_version(environ, "HEADRACE_OSMOSIS_OLDEST"),
            failpoint=environ.get("HEADRACE_FAILPOINT") or None,
            telemetry=any(
                environ.get(name)
                for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
            ),
            in_cluster="KUBERNETES_SERVICE_HOST" in environ,
        )

    @property
    def has_one_workspace(self) -> bool:
        """Whether there may be one workspace only: its code is trusted with what the others have, and
        the installation is not on a machine of its user alone."""
        urls = (self.url, self.public_url)
        is_alone = all((urlsplit(url).hostname or "") in THIS_MACHINE for url in urls)
        is_shared = self.in_cluster or self.sandbox_service is not None or not is_alone
        return self.sandbox == TRUSTED and is_shared

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "127.0.0.1"

    @property
    def hosts(self) -> frozenset[str]:
        """The names of this server: in its own address, and in the one that forges and browsers use."""
        public = urlsplit(self.public_url).hostname or self.host
        return frozenset((self.host.lower(), public.lower()))

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 8420

    @property
    def directories(self) -> tuple[Path, ...]:
        """The local directories that this installation writes to."""
        local = self.blobs.startswith("file:")
        blobs = Path(unquote(urlsplit(self.blobs).path)) if local else self.home
        return tuple(dict.fromkeys((self.home, blobs, (self.home / "postgres").resolve())))

    def read_api_key(self) -> str | None:
        """Return the API key from the environment or else from the home's key file; None without
        one."""
        if self.api_key:
            return self.api_key
        path = self.home / "token"
        return path.read_text().strip() if path.exists() else None


def _api_key(environ: Mapping[str, str]) -> str | None:
    """The API key of HEADRACE_API_KEY, or of its old name HEADRACE_TOKEN. Raises BadSetting for one
    that no header of a request can hold."""
    name = "HEADRACE_API_KEY" if environ.get("HEADRACE_API_KEY", "").strip() else "HEADRACE_TOKEN"
    api_key = environ.get(name, "").strip()
    if any(not "!" <= character <= "~" for character in api_key):
        raise BadSetting(
            f"{name} holds a space, a line break or a character beyond ASCII; set it to the "
            "text of the API key alone, the first line that `headrace key create` prints"
        )
    return api_key or None


def sandbox_level(environ: Mapping[str, str]) -> str:
    """Return the level of HEADRACE_SANDBOX. Raises BadSetting."""
    name = "HEADRACE_SANDBOX"
    if environ.get(name) == "process":
        raise BadSetting(
            f"{name} holds 'process', which is now called 'process-trusted'; it protects from accidents "
            "only, so remove the variable to confine user code with bubblewrap"
        )
    return _one_of(environ, name, ("bwrap", "gvisor", "process-trusted"))


def _oidc(environ: Mapping[str, str]) -> OidcSettings | None:
    try:
        return OidcSettings.load(environ)
    except ValueError as error:
        raise BadSetting(str(error)) from error


def _sandbox_limits(environ: Mapping[str, str]) -> SandboxLimits:
    try:
        return load_sandbox_limits(environ)
    except ValueError as error:
        raise BadSetting(str(error)) from error


def _sandbox_service(environ: Mapping[str, str]) -> SandboxAddress | None:
    try:
        return SandboxAddress.load(environ)
    except ValueError as error:
        raise BadSetting(str(error)) from error


def _home(environ: Mapping[str, str]) -> Path:
    value = environ.get("HEADRACE_HOME")
    try:
        return Path(value or "~/.headrace").expanduser().absolute()
    except RuntimeError as error:
        held = f"holds {value!r}" if value else "is not set"
        raise BadSetting(
            f"HEADRACE_HOME {held}, and that user (uid {os.geteuid()}) has no home directory; set it "
            "to the absolute path of a directory of your own"
        ) from error


def _url(environ: Mapping[str, str]) -> str:
    return _http("HEADRACE_URL", environ.get("HEADRACE_URL") or "http://127.0.0.1:8420")


def _public_url(environ: Mapping[str, str]) -> str:
    value = environ.get("HEADRACE_PUBLIC_URL")
    return _http("HEADRACE_PUBLIC_URL", value) if value else _url(environ)


def _trusted_proxies(environ: Mapping[str, str]) -> tuple[Network, ...]:
    value = environ.get("HEADRACE_TRUSTED_PROXIES") or ""
    try:
        return tuple(ip_network(part.strip()) for part in value.split(",") if part.strip())
    except ValueError as error:
        may = "addresses and networks with commas between them, like 10.0.0.7,192.168.0.0/24"
        raise _bad("HEADRACE_TRUSTED_PROXIES", value, may) from error


def _secret_keys(
    environ: Mapping[str, str],
) -> tuple[KeySource | None, tuple[KeySource, ...]]:
    """Return the key that seals secrets (None for the key file of the home) and the keys before it."""
    try:
        return load_sources(environ)
    except ValueError as error:
        raise BadSetting(str(error)) from error


def _http(name: str, value: str) -> str:
    if not _is_http(value):
        raise _bad(name, value, "http://host:port")
    return value.rstrip("/")


def _is_http(value: str) -> bool:
    parts = urlsplit(value)
    try:
        return bool(parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0)
    except ValueError:
        return False


def _database(environ: Mapping[str, str]) -> str | None:
    value = environ.get("HEADRACE_DATABASE_URL") or None
    if value and urlsplit(value).scheme not in ("postgres", "postgresql"):
        raise _bad("HEADRACE_DATABASE_URL", value, "postgresql://user@host/database")
    return value


def _number(environ: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    value = environ.get(name)
    if not value:
        return default
    if not value.isascii() or not value.isdigit() or not least <= int(value[:9]) <= most:
        raise _bad(name, value, f"a whole number from {least} to {most}")
    return int(value)


def _kafka(environ: Mapping[str, str]) -> KafkaSettings | None:
    try:
        return KafkaSettings.load(environ)
    except ValueError as error:
        raise BadSetting(str(error)) from error


def _blobs(environ: Mapping[str, str], home: Path) -> str:
    value = environ.get("HEADRACE_BLOBS") or f"file://{home}/blobs"
    if value.startswith("file:///"):
        return value
    try:
        return str(S3Place.parse(value))
    except ValueError as error:
        raise _bad("HEADRACE_BLOBS", value, "file:///directory or s3://bucket/prefix") from error


def _s3_endpoint(environ: Mapping[str, str]) -> str | None:
    """Return the address of an S3 store other than AWS, or None. boto3's variables for it are read
    too."""
    for name in ("HEADRACE_S3_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if value := environ.get(name):
            return _http(name, value)
    return None


def _s3_public_endpoint(environ: Mapping[str, str]) -> str | None:
    """Return the address at which clients reach the S3 store, or None when they do not."""
    name = "HEADRACE_S3_PUBLIC_ENDPOINT"
    if not (value := environ.get(name)):
        return None
    if not is_public_endpoint(value):
        raise _bad(name, value, "https://host:port, or http://127.0.0.1:port on the same machine")
    if not (environ.get("HEADRACE_BLOBS") or "").startswith("s3://"):
        raise _bad(name, value, "set only with HEADRACE_BLOBS=s3://bucket/prefix")
    return value.rstrip("/")


def _vllm(environ: Mapping[str, str], home: Path) -> VllmSettings | None:
    """Return the vLLM settings; None for the torch engine."""
    value = environ.get("HEADRACE_SAMPLER") or "torch"
    if value == "torch":
        return None
    server = _vllm_server(environ) if value == "vllm" else None
    name, _, listed = (f"vllm={server.url}" if server else value).partition("=")
    urls = tuple(url.strip().rstrip("/") for url in listed.split(","))
    if name != "vllm" or not all(map(_is_http, urls)) or len(set(urls)) < len(urls):
        may = "torch, vllm, or vllm=http://host:port[,http://host:port...] with each server once"
        raise _bad("HEADRACE_SAMPLER", value, may)
    adapters = Path(environ.get("HEADRACE_VLLM_ADAPTERS") or home / "adapters")
    if not adapters.is_absolute():
        raise _bad("HEADRACE_VLLM_ADAPTERS", str(adapters), "an absolute path")
    try:
        tuning = read_tuning(environ)
    except BadValue as error:
        raise _bad(*error.args) from error
    return VllmSettings(
        urls=urls,
        adapters=adapters,
        server=server,
        tuning=tuning,
        api_key=environ.get("HEADRACE_VLLM_API_KEY") or None,
    )


def _network(environ: Mapping[str, str]) -> NetworkPolicy:
    value = environ.get(network_policy.VARIABLE) or ""
    try:
        return NetworkPolicy.parse(value)
    except ValueError as error:
        raise _bad(network_policy.VARIABLE, value, network_policy.FORM) from error


def _capacity(environ: Mapping[str, str], variable: str) -> Mapping[str, int]:
    value = environ.get(variable) or ""
    try:
        return capacity.parse_capacity(value)
    except ValueError as error:
        raise _bad(variable, value, capacity.FORM) from error


def _prices(environ: Mapping[str, str]) -> Mapping[str, float]:
    value = environ.get(prices.VARIABLE) or ""
    try:
        return prices.parse_prices(value)
    except ValueError as error:
        raise _bad(prices.VARIABLE, value, f"{prices.FORM} ({error})") from error


def _quotas(environ: Mapping[str, str], variable: str, names: Collection[str]) -> Mapping[str, int]:
    value = environ.get(variable) or ""
    try:
        return quotas.parse_quotas(value, names)
    except ValueError as error:
        raise _bad(variable, value, quotas.FORM + ", ".join(names)) from error


def _vllm_server(environ: Mapping[str, str]) -> VllmLaunch:
    if environ.get("HEADRACE_WORKERS") == "each":
        raise BadSetting(
            "HEADRACE_WORKERS holds 'each'; with HEADRACE_SAMPLER=vllm it may hold one or two, since "
            "the processes share one GPU"
        )
    try:
        return VllmLaunch.load(environ)
    except BadValue as error:
        raise _bad(*error.args) from error


def _alerts(environ: Mapping[str, str]) -> AlertSettings:
    try:
        return AlertSettings.load(environ)
    except BadAlertSetting as error:
        raise BadSetting(str(error)) from error


def _git(environ: Mapping[str, str]) -> GitSettings:
    try:
        return GitSettings.load(environ, urls=(_url(environ), _public_url(environ)))
    except BadValue as error:
        raise _bad(*error.args) from error


def _model_directories(environ: Mapping[str, str]) -> ModelDirectories:
    try:
        return ModelDirectories.load(environ, urls=(_url(environ), _public_url(environ)))
    except BadValue as error:
        raise _bad(*error.args) from error


def _packages(environ: Mapping[str, str]) -> PackageSettings:
    try:
        return PackageSettings.load(environ)
    except ValueError as error:
        raise BadSetting(str(error)) from error


def _serving(environ: Mapping[str, str]) -> ServingSettings:
    try:
        return ServingSettings.load(environ)
    except BadValue as error:
        raise _bad(*error.args) from error


def _version(environ: Mapping[str, str], name: str) -> str | None:
    value = environ.get(name) or None
    if value is not None and not VERSION.fullmatch(value):
        raise _bad(name, value, "a version such as 0.3.8")
    return value


def _one_of(environ: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    value = environ.get(name) or known[0]
    if value in known:
        return value
    raise _bad(name, value, ", ".join(known))


def _bad(name: str, value: str, may: str) -> BadSetting:
    return BadSetting(f"{name} holds {redact_setting(value)!r}; it may hold {may}")
