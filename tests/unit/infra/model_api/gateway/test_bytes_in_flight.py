"""One key cannot fill the memory with requests that are not answered yet."""

import asyncio
import json
import time

import pytest

from infra.model_api.gateway.bodies import MOST_BRACES, SMALL_BODY, check_braces
from infra.model_api.gateway.bytes_in_flight import BytesInFlight
from infra.model_api.wire.errors import GatewayError

LARGE = SMALL_BODY * 2


def status_of(in_flight: BytesInFlight, key: str, length: int) -> int:
    try:
        with in_flight.hold(key) as held:
            held.check_room(length)
    except GatewayError as error:
        return error.status
    return 200


def test_a_key_has_its_bytes_and_all_keys_have_theirs() -> None:
    in_flight = BytesInFlight(of_key=2 * LARGE, in_all=3 * LARGE)
    with in_flight.hold("a") as one, in_flight.hold("a") as two, in_flight.hold("b") as other:
        one.check_room(LARGE)
        two.check_room(LARGE)
        assert status_of(in_flight, "a", 1) == 429
        other.check_room(LARGE)
        assert status_of(in_flight, "c", LARGE) == 503
        assert status_of(in_flight, "c", SMALL_BODY) == 200, "small ones have their place"
    assert in_flight.num_large_bytes == 0
    assert status_of(in_flight, "a", 2 * LARGE) == 200


def test_the_keys_of_an_organisation_leave_room_for_another_one() -> None:
    in_flight = BytesInFlight(of_organisation=2 * LARGE, in_all=3 * LARGE)
    with (
        in_flight.hold("a", organisation="x") as one,
        in_flight.hold("b", organisation="x") as two,
        in_flight.hold("c", organisation="x") as three,
        in_flight.hold("d", organisation="y") as other,
    ):
        one.check_room(LARGE)
        two.check_room(LARGE)
        with pytest.raises(GatewayError, match="of your organisation") as refused:
            three.check_room(LARGE)
        assert refused.value.status == 429
        three.check_room(SMALL_BODY)
        other.check_room(LARGE)
    with in_flight.hold("c", organisation="x") as after:
        after.check_room(2 * LARGE)
    assert in_flight.num_large_bytes == 0


def test_a_body_without_a_length_is_counted_as_it_arrives() -> None:
    in_flight = BytesInFlight(of_key=LARGE)
    with in_flight.hold("a") as held:
        held.check_room(0)
        held.count_received(LARGE)
        with pytest.raises(GatewayError, match="try again"):
            held.count_received(1)
        assert in_flight.num_large_bytes == LARGE
    assert in_flight.num_large_bytes == 0


def test_a_key_may_be_named_after_its_body_was_read() -> None:
    in_flight = BytesInFlight(of_key=LARGE, requests=2)
    with in_flight.hold() as one:
        one.check_room(LARGE)
        one.belongs_to("a")
        with in_flight.hold() as two:
            two.check_room(LARGE)
            with pytest.raises(GatewayError) as refused:
                two.belongs_to("a")
            assert refused.value.status == 429
            two.belongs_to("b")
        with in_flight.hold("a"), pytest.raises(GatewayError), in_flight.hold("a"):
            pass
    assert status_of(in_flight, "a", LARGE) == 200
    assert in_flight.num_large_bytes == 0


async def test_a_request_of_a_sample_waits_for_room() -> None:
    in_flight = BytesInFlight(of_key=LARGE)
    began = asyncio.Event()

    async def second() -> None:
        async with in_flight.wait_for_room("run", LARGE):
            began.set()

    async with in_flight.wait_for_room("run", LARGE):
        waiting = asyncio.ensure_future(second())
        async with in_flight.wait_for_room("run", SMALL_BODY), in_flight.wait_for_room("b", LARGE):
            assert not began.is_set()
    async with asyncio.timeout(10):
        await waiting
    assert began.is_set()
    assert in_flight.num_large_bytes == 0


def test_a_body_of_nothing_but_objects_is_not_parsed() -> None:
    check_braces(b"{" * MOST_BRACES)
    with pytest.raises(GatewayError) as refused:
        check_braces(b"[" * (MOST_BRACES + 1))
    assert refused.value.status == 413


def test_braces_in_texts_are_no_objects() -> None:
    """A prompt may be a long JSON document or a program."""
    text = json.dumps({"a": 'say "hi" {[' * MOST_BRACES, "b\\": "{" * MOST_BRACES})
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    check_braces(body)
    with pytest.raises(GatewayError):
        check_braces(body + b"[" * MOST_BRACES)


def test_a_text_without_an_end_is_searched_once() -> None:
    began = time.process_time()
    for end in (b"", b"\\", b"{" * MOST_BRACES):
        check_braces(b"[" + b'"' + b'\\"' * (1 << 20) + end + b"{" * MOST_BRACES)
    assert time.process_time() - began < 5
