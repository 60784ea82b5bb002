"""The rights of the SASL user of each service of a cluster on Kafka.

`api` and `relay` publish the log and read how far the groups are. Every other service reads the topics
of the events that it consumes, in its own group. All services may list the topics. None may delete one
or change its settings. The users themselves belong to the brokers' configuration.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, NoError, for_code
from aiokafka.protocol.admin import CreateAclsRequest

from infra.settings.kafka import KafkaSettings
from infra.spine.bus.kafka.bus import group_prefix
from infra.spine.bus.kafka.connect import client_options
from infra.spine.bus.kafka.topics import all_topics, create_missing_topics, topics_for_types
from schemas.errors import InvalidConfig, TransientError

PUBLISHERS = ("api", "relay")
ALLOW = 3
ANY_HOST = "*"


class Resource(IntEnum):
    """Kafka's numbers for kinds of resources."""

    TOPIC = 2
    GROUP = 3


class Operation(IntEnum):
    """Kafka's numbers for operations. `READ` and `WRITE` include `DESCRIBE`."""

    READ = 3
    WRITE = 4
    CREATE = 5
    DESCRIBE = 8


class Pattern(IntEnum):
    """Kafka's numbers for the meaning of a resource's name."""

    LITERAL = 3
    PREFIX = 4


@dataclass(frozen=True, slots=True)
class Right:
    """One operation on the resources of a name."""

    resource: Resource
    name: str
    operation: Operation
    pattern: Pattern = Pattern.LITERAL


def user_of(service: str) -> str:
    """The SASL user of a service."""
    return f"headrace_{service}"


def rights_of(settings: KafkaSettings, service: str, types: Iterable[str]) -> tuple[Right, ...]:
    """The rights of a service that consumes events of these types."""
    topics = all_topics(settings)
    if service in PUBLISHERS:
        operations = (Operation.READ, Operation.WRITE, Operation.CREATE)
        return (
            *(Right(Resource.TOPIC, topic, each) for topic in topics for each in operations),
            Right(Resource.GROUP, group_prefix(settings), Operation.READ, Pattern.PREFIX),
        )
    return (
        *(Right(Resource.TOPIC, topic, Operation.DESCRIBE) for topic in topics),
        *(
            Right(Resource.TOPIC, topic, Operation.READ)
            for topic in topics_for_types(settings, types)
        ),
        Right(Resource.GROUP, group_prefix(settings) + service, Operation.READ),
    )


async def grant_rights(settings: KafkaSettings, types: Mapping[str, Iterable[str]]) -> None:
    """Create the topics, and give the user of each service (name -> the types of the events that it
    consumes) its rights. Rights that it has already stay. Raises InvalidConfig when our own user may
    not do that, and TransientError when no broker answers."""
    admin = AIOKafkaAdminClient(**client_options(settings))
    try:
        await admin.start()
        await create_missing_topics(admin, settings)
        for service, consumed in types.items():
            for right in rights_of(settings, service, consumed):
                await _grant(admin, user_of(service), right)
    except KafkaError as error:
        raise TransientError(
            f"Kafka at {settings.address} did not take the rights: {error}"
        ) from error
    finally:
        await admin.close()


async def _grant(admin: AIOKafkaAdminClient, user: str, right: Right) -> None:
    request = CreateAclsRequest(
        right.resource,
        right.name,
        right.pattern,
        f"User:{user}",
        ANY_HOST,
        right.operation,
        ALLOW,
    )
    answer = await admin._send_request(request)
    for code, message in answer.creation_responses:
        error = for_code(code)
        if error is not NoError:
            raise InvalidConfig(
                f"Kafka refuses rights for {user} ({message or error.__name__}); log in as a user of "
                "super.users, and set authorizer.class.name on the brokers"
            )
