"""A real Apache Kafka on this machine without Docker: one KRaft node in a directory of our own.

The jars come through Maven once, into a cache; a server is a `java` process that dies with the process
that started it. It can be killed, started again on the same ports, and wiped, for that is what tests of
a broker's death need. Needs JDK 17 or newer and Maven.
"""

import base64
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from infra.operations.local.death_signal import die_with
from infra.operations.local.free_port import free_port
from schemas.errors import InvalidConfig, TransientError

VERSION = "4.3.1"
LOG4J = "2.25.3"
READY_S = 60.0
STOP_S = 20.0

POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion>
<groupId>headrace</groupId><artifactId>kafka-stack</artifactId><version>1</version>
<dependencies>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId>
<version>{VERSION}</version></dependency>
<dependency><groupId>org.apache.logging.log4j</groupId><artifactId>log4j-slf4j-impl</artifactId>
<version>{LOG4J}</version></dependency>
</dependencies>
</project>
"""

COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"

PROPERTIES = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL_SSL:SASL_SSL
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
"""
"""One node has nobody to replicate to; the short session lets a killed node come back in seconds."""

PLAIN_LISTENERS = """
listeners=PLAINTEXT://127.0.0.1:{plain},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{told}
"""

SECURE_LISTENERS = """
listeners=PLAINTEXT://127.0.0.1:{plain},CONTROLLER://127.0.0.1:{controller},SASL_SSL://127.0.0.1:{tls}
advertised.listeners=PLAINTEXT://127.0.0.1:{told},SASL_SSL://127.0.0.1:{tls}
sasl.enabled.mechanisms=PLAIN
ssl.keystore.type=PKCS12
ssl.keystore.location={keystore}
ssl.keystore.password={password}
listener.name.sasl_ssl.plain.sasl.jaas.config=\
org.apache.kafka.common.security.plain.PlainLoginModule required user_headrace="{password}";
"""


ACCOUNT_LISTENERS = """
listeners=CLIENTS://127.0.0.1:{plain},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=CLIENTS://127.0.0.1:{told}
listener.security.protocol.map=CLIENTS:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=CLIENTS
sasl.enabled.mechanisms=PLAIN
sasl.mechanism.inter.broker.protocol=PLAIN
listener.name.clients.plain.sasl.jaas.config=\
org.apache.kafka.common.security.plain.PlainLoginModule required username="{admin}" \
password="{admin_password}" {users};
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:{admin};User:ANONYMOUS
"""
"""As in docker-compose.yml: everybody logs in. There only the broker reaches the controller's port."""

ADMIN = "kafka"
"""The user that administers the broker. It grants the other users their rights."""


@dataclass(frozen=True, slots=True)
class Secure:
    """The listener with TLS and a password: what a client needs to know of it."""

    bootstrap: str
    ca: Path
    username: str
    password: str


def missing() -> str | None:
    """The reason why this machine cannot run Kafka, or None."""
    lacks = [program for program in ("java", "mvn") if shutil.which(program) is None]
    return f"{' and '.join(lacks)} (JDK 17 and Maven)" if lacks else None


def jars() -> Path:
    """The directory of the jars, downloaded at the first call. Raises InvalidConfig, TransientError."""
    if lacks := missing():
        raise InvalidConfig(f"Kafka without Docker needs {lacks}; install them")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"
    found = cache / f"kafka-{VERSION}"
    if found.exists():
        return found
    scratch = cache / f"kafka-{VERSION}.{os.getpid()}"
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "pom.xml").write_text(POM)
    done = subprocess.run(
        ["mvn", "-q", "-B", COPY, "-DincludeScope=runtime", f"-DoutputDirectory={scratch}"],
        cwd=scratch,
        capture_output=True,
    )
    if done.returncode:
        said = (done.stdout + done.stderr).decode(errors="replace")[-800:]
        raise TransientError(f"Maven could not fetch Kafka {VERSION}: {said}")
    if not found.exists():
        scratch.rename(found)
    return found


class KafkaServer:
    """One broker and controller. `bootstrap` stays the same over its lives. `before`: (port, the
    broker's own port) of a proxy that its clients must use. With `users` (name -> password) clients log
    in, and need rights; `passwords` has that of ADMIN too."""

    def __init__(
        self,
        directory: Path,
        *,
        with_security: bool = False,
        users: Mapping[str, str] | None = None,
        before: tuple[int, int] | None = None,
    ) -> None:
        self.passwords = {ADMIN: uuid4().hex, **users} if users else {}
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._libs = jars()
        told, plain = before or (free_port(),) * 2
        self._ports = {"told": told, "plain": plain, "controller": free_port(), "tls": free_port()}
        self.bootstrap = f"127.0.0.1:{told}"
        self.secure = self._make_secure() if with_security else None
        self.cluster_id = ""
        self.process: subprocess.Popen[bytes] | None = None
        # The kernel ends a child that is to die with us when the *thread* that made it ends.
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="kafka")
        self.wipe()

    @property
    def environment(self) -> dict[str, str]:
        """The settings with which its administrator reaches it."""
        if not self.passwords:
            return {"HEADRACE_KAFKA": self.bootstrap}
        return {
            "HEADRACE_KAFKA": self.bootstrap,
            "HEADRACE_KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT",
            "HEADRACE_KAFKA_USERNAME": ADMIN,
            "HEADRACE_KAFKA_PASSWORD": self.passwords[ADMIN],
        }

    @property
    def log(self) -> Path:
        return self._directory / "kafka.log"

    def start(self) -> None:
        """Start it and wait until it answers. Raises TransientError when it does not."""
        self.process = self._launcher.submit(self._launch).result()
        deadline = time.monotonic() + READY_S
        while not answers(self._ports["plain"]):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise TransientError(f"Kafka did not start; look into {self.log}")
            time.sleep(0.05)

    def _launch(self) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as output:
            return subprocess.Popen(
                [*self._java(), "kafka.Kafka", str(self._properties)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )

    def stop(self) -> None:
        """Stop it in order."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Stop it as a power cut would."""
        self._end(signal.SIGKILL)

    def wipe(self, *, cluster_id: str | None = None) -> None:
        """Delete everything it holds. It comes back empty, as another cluster unless an id is given.
        It must not run."""
        shutil.rmtree(self._data, ignore_errors=True)
        self.cluster_id = cluster_id or new_cluster_id()
        self._properties.touch(mode=0o600)
        self._properties.write_text(self._configuration())
        arguments = ["format", "-t", self.cluster_id, "-c", str(self._properties)]
        done = subprocess.run(
            [*self._java(), "kafka.tools.StorageTool", *arguments], capture_output=True
        )
        if done.returncode:
            said = (done.stdout + done.stderr).decode(errors="replace")[-800:]
            raise TransientError(f"Kafka's directory cannot be made: {said}")

    @property
    def _data(self) -> Path:
        return self._directory / "data"

    @property
    def _properties(self) -> Path:
        return self._directory / "server.properties"

    def _java(self) -> list[str]:
        heap = ("-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
        return ["java", *heap, "-cp", f"{self._libs}/*"]

    def _configuration(self) -> str:
        listeners = PLAIN_LISTENERS if self.secure is None else SECURE_LISTENERS
        if self.passwords:
            listeners = ACCOUNT_LISTENERS
        return (PROPERTIES + listeners).format(
            data=self._data,
            keystore=self._directory / "server.p12",
            password=self.secure.password if self.secure else "",
            admin=ADMIN,
            admin_password=self.passwords.get(ADMIN),
            users=" ".join(f'user_{name}="{text}"' for name, text in self.passwords.items()),
            **self._ports,
        )

    def _make_secure(self) -> Secure:
        """A certificate for 127.0.0.1 that signs itself, and a user."""
        store, ca, password = (
            self._directory / "server.p12",
            self._directory / "ca.pem",
            uuid4().hex,
        )
        common = ["-alias", "kafka", "-keystore", str(store), "-storepass", password]
        for arguments in (
            "-genkeypair -keyalg RSA -storetype PKCS12 -dname CN=127.0.0.1 -ext SAN=ip:127.0.0.1",
            f"-exportcert -rfc -file {ca}",
        ):
            subprocess.run(
                ["keytool", *arguments.split(" "), *common], check=True, capture_output=True
            )
        return Secure(f"127.0.0.1:{self._ports['tls']}", ca, "headrace", password)

    def _end(self, number: signal.Signals) -> None:
        if self.process is None:
            return
        self.process.send_signal(number)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None


@contextmanager
def kafka_server(
    directory: Path,
    *,
    with_security: bool = False,
    users: Mapping[str, str] | None = None,
    before: tuple[int, int] | None = None,
) -> Iterator[KafkaServer]:
    """A Kafka in `directory` that runs while inside."""
    server = KafkaServer(directory, with_security=with_security, users=users, before=before)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def answers(port: int) -> bool:
    """Whether a broker there accepts requests: it opens its port only when it does."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def new_cluster_id() -> str:
    """A UUID in 22 characters, as Kafka writes them: never with a dash in front, which its tools would
    take for an option."""
    first, *rest = uuid4().bytes
    return base64.urlsafe_b64encode(bytes([first & 0x7F, *rest])).decode().rstrip("=")
