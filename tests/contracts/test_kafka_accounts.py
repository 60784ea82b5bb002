"""Each service of a cluster has a SASL user on Kafka, which may do what the service does and no more."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import (
    GroupAuthorizationFailedError,
    KafkaError,
    TopicAuthorizationFailedError,
    for_code,
)

from consumers.process.accounts import consumed_types
from infra.settings.kafka import KafkaSettings
from infra.spine.bus.kafka.accounts import grant_rights, user_of
from infra.spine.bus.kafka.bus import group_prefix
from infra.spine.bus.kafka.connect import client_options
from infra.spine.bus.kafka.topics import all_topics, topics_for_types
from schemas.errors import InvalidConfig
from tests.kit.kafka import need_kafka
from tests.stack.kafka import ADMIN, KafkaServer, kafka_server

pytestmark = pytest.mark.kafka

TYPES = consumed_types()
PASSWORDS = {user_of(service): f"{service}x7Kq".ljust(24, "0") for service in TYPES}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    need_kafka()
    with kafka_server(tmp_path_factory.mktemp("kafka"), users=PASSWORDS) as server:
        asyncio.run(grant_rights(login(server, ADMIN), TYPES))
        yield server


def login(server: KafkaServer, user: str) -> KafkaSettings:
    """The settings of a service, or of the administrator."""
    return KafkaSettings(
        servers=(server.bootstrap,),
        protocol="SASL_PLAINTEXT",
        username=user,
        password=server.passwords[user],
        partitions=1,
        replication=1,
    )


async def publish(settings: KafkaSettings, topic: str) -> None:
    producer = AIOKafkaProducer(**client_options(settings), enable_idempotence=True, acks="all")
    try:
        await producer.start()
        await producer.send_and_wait(topic, b"{}")
    finally:
        await producer.stop()


async def consume_one(settings: KafkaSettings, topic: str, group: str) -> bytes:
    consumer = AIOKafkaConsumer(
        topic, **client_options(settings), group_id=group, auto_offset_reset="earliest"
    )
    try:
        await consumer.start()
        async with asyncio.timeout(60):
            record = await consumer.getone()
        await consumer.commit()
        return bytes(record.value)
    finally:
        await consumer.stop()


async def test_publishers_write_and_each_service_reads_its_events(broker: KafkaServer) -> None:
    api = login(broker, user_of("api"))
    for service in ("learn", "run", "grade"):
        topic = topics_for_types(api, TYPES[service])[0]
        await publish(api, topic)
        own = login(broker, user_of(service))
        assert await consume_one(own, topic, group_prefix(own) + service) == b"{}"


async def test_a_service_writes_no_topic(broker: KafkaServer) -> None:
    for service in set(TYPES) - {"api", "relay"}:
        settings = login(broker, user_of(service))
        with pytest.raises(KafkaError):
            await publish(settings, all_topics(settings)[0])


async def test_a_service_reads_no_topic_that_it_does_not_consume(broker: KafkaServer) -> None:
    own = login(broker, user_of("learn"))
    foreign = sorted(set(all_topics(own)) - set(topics_for_types(own, TYPES["learn"])))
    with pytest.raises(TopicAuthorizationFailedError):
        await consume_one(own, foreign[0], group_prefix(own) + "learn")


async def test_a_service_joins_no_group_of_another(broker: KafkaServer) -> None:
    own = login(broker, user_of("learn"))
    topic = topics_for_types(own, TYPES["learn"])[0]
    with pytest.raises(GroupAuthorizationFailedError):
        await consume_one(own, topic, group_prefix(own) + "run")


async def test_no_service_deletes_a_topic(broker: KafkaServer) -> None:
    for service in ("api", "relay", "learn"):
        settings = login(broker, user_of(service))
        admin = AIOKafkaAdminClient(**client_options(settings))
        await admin.start()
        answer = await admin.delete_topics([all_topics(settings)[0]])
        assert [for_code(code) for _, code in answer.topic_error_codes] == [
            TopicAuthorizationFailedError
        ]
        await admin.close()


async def test_a_password_of_another_service_is_refused(broker: KafkaServer) -> None:
    settings = replace(login(broker, user_of("learn")), password=PASSWORDS[user_of("run")])
    with pytest.raises(KafkaError):
        await publish(settings, all_topics(settings)[0])


async def test_a_service_grants_no_rights(broker: KafkaServer) -> None:
    with pytest.raises(InvalidConfig, match="log in as a user of"):
        await grant_rights(login(broker, user_of("learn")), TYPES)
