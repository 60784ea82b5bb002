"""Device login over HTTP: what the program gets, what the person decides, and what guessing costs."""

import asyncio
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from infra.http.request_limits import Rate, RequestLimits
from infra.identity.device_logins import USER_LENGTH, USER_LETTERS, DeviceLoginStore, new_user_code
from infra.ports.actor import MAIN, Actor
from producers.core.device_login import DeviceLogins
from producers.http.auth import DEVICE_LIMITS
from producers.http.credentials import Credentials
from schemas.errors import NotFound, QuotaExceeded
from tests.kit.application import Application
from tests.kit.people import SignedUp, member
from tests.kit.tenants import ask, create_api_key

pytestmark = pytest.mark.postgres


async def actor_of(app: Application, text: str) -> Actor:
    found = await Credentials(app.services).actor_with(text, "192.0.2.1")
    assert isinstance(found, Actor)
    return found


async def begin(app: Application, name: str = "Ada's laptop") -> Any:
    answer = await send(app, "authorize", device_name=name)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def send(app: Application, route: str, **body: object) -> httpx.Response:
    """The response to a request without an API key."""
    transport = httpx.ASGITransport(app.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=str(app.api.base_url)) as client:
        return await client.post(f"/api/v1/device/{route}", json=body)


async def poll(app: Application, begun: Any) -> httpx.Response:
    """The response to a question that does not come too soon."""
    await app.database.durable.execute("update device_logins set polled_at = null")
    return await send(app, "token", device_code=begun["device_code"])


async def approve(app: Application, begun: Any, person: SignedUp) -> str:
    actor = await actor_of(app, person.api_key)
    return await app.services.device_logins.approve(begun["user_code"], actor)


async def test_an_approved_login_becomes_one_api_key_of_the_person(app: Application) -> None:
    ada = await member(app, "ada", "member")
    begun = await begin(app)
    assert begun["verification_uri_complete"].endswith(f"/device?code={begun['user_code']}")
    assert (begun["expires_in"], begun["interval"]) == (600, 5)
    pending = await poll(app, begun)
    assert (pending.status_code, pending.json()["code"]) == (400, "AUTHORIZATION_PENDING")
    assert await approve(app, begun, ada) == "Ada's laptop"
    issued = (await poll(app, begun)).json()
    assert issued["person"] == {"id": ada.id, "name": "ada", "email": ada.email}
    assert issued["api_key"]["name"] == "Ada-s-laptop"
    assert issued["api_key"]["scopes"] == ["control", "inference", "read", "submit"]
    assert issued["api_key"]["organisation"] == MAIN
    left = datetime.fromisoformat(issued["api_key"]["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=89.9) < left <= timedelta(days=90)
    who = (await ask(app, "GET", "/api/v1/whoami", issued["secret"])).json()
    assert (who["person"]["id"], who["role"]) == (ada.id, "member")
    assert (who["organisation_name"], who["workspace_name"]) == ("main", None)
    again = await poll(app, begun)
    assert again.json()["code"] == "EXPIRED_TOKEN"


async def test_only_hashes_of_the_codes_are_stored(app: Application) -> None:
    begun = await begin(app)
    row = await app.database.durable.fetchrow("select * from device_logins")
    stored = str(dict(row)).lower()
    for code in (begun["device_code"], begun["user_code"], begun["user_code"].replace("-", "")):
        assert code.lower() not in stored
        assert code.encode().hex() not in stored


def test_user_codes_have_more_than_40_bits_and_no_letter_that_looks_like_another() -> None:
    assert len(USER_LETTERS) ** USER_LENGTH > 2**40
    assert not set(USER_LETTERS) & set("AEIOU01")
    codes = {new_user_code() for _ in range(1000)}
    assert len(codes) == 1000
    assert all(re.fullmatch(f"[{USER_LETTERS}]{{5}}-[{USER_LETTERS}]{{5}}", one) for one in codes)


async def test_a_code_may_be_typed_in_small_letters_and_without_its_hyphen(
    app: Application,
) -> None:
    ada = await member(app, "ada", "viewer")
    begun = await begin(app)
    begun["user_code"] = f" {begun['user_code'].replace('-', '').lower()} "
    assert await approve(app, begun, ada)


async def test_a_program_that_asks_too_often_is_told_to_slow_down(app: Application) -> None:
    begun = await begin(app)
    codes = [
        (await send(app, "token", device_code=begun["device_code"])).json()["code"]
        for _ in range(3)
    ]
    assert codes == ["AUTHORIZATION_PENDING", "SLOW_DOWN", "SLOW_DOWN"]
    row = await app.database.durable.fetchrow("select interval_s from device_logins")
    assert row["interval_s"] == 15


async def test_a_denied_login_gets_no_key(app: Application) -> None:
    ada = await member(app, "ada", "owner")
    begun = await begin(app)
    await app.services.device_logins.deny(begun["user_code"], await actor_of(app, ada.api_key))
    assert (await poll(app, begun)).json()["code"] == "ACCESS_DENIED"
    assert (await poll(app, begun)).json()["code"] == "EXPIRED_TOKEN"
    assert await keys_of(app, ada) == 1


async def keys_of(app: Application, person: SignedUp) -> int:
    query = "select count(*) from api_keys where person = $1 and revoked_at is null"
    return int(await app.database.durable.fetchval(query, person.id))


async def test_a_code_that_is_approved_twice_makes_one_key(app: Application) -> None:
    ada = await member(app, "ada", "owner")
    bea = await member(app, "bea", "member")
    begun = await begin(app)
    both = await asyncio.gather(
        approve(app, begun, ada), approve(app, begun, bea), return_exceptions=True
    )
    assert sorted(isinstance(one, NotFound) for one in both) == [False, True]
    await app.database.durable.execute("update device_logins set polled_at = null")
    asked = [send(app, "token", device_code=begun["device_code"]) for _ in range(2)]
    answers = await asyncio.gather(*asked)
    assert sum(answer.status_code == 200 for answer in answers) == 1
    assert await keys_of(app, ada) + await keys_of(app, bea) == 3


async def test_a_code_expires_after_its_time(app: Application) -> None:
    ada = await member(app, "ada", "owner")
    begun = await begin(app)
    await app.database.durable.execute("update device_logins set expires_at = now()")
    with pytest.raises(NotFound, match="older than 10 minutes"):
        await approve(app, begun, ada)
    assert (await poll(app, begun)).json()["code"] == "EXPIRED_TOKEN"
    late = await begin(app)
    await approve(app, late, ada)
    await app.database.durable.execute("update device_logins set expires_at = now()")
    assert (await poll(app, late)).json()["code"] == "EXPIRED_TOKEN"


async def test_the_key_has_no_more_rights_than_the_key_that_approved(app: Application) -> None:
    soon = datetime.now(UTC) + timedelta(days=3)
    ada = await member(app, "ada", "owner", scopes=frozenset({"submit"}), expires_at=soon)
    begun = await begin(app)
    await approve(app, begun, ada)
    made = (await poll(app, begun)).json()["api_key"]
    assert made["scopes"] == ["submit"]
    assert datetime.fromisoformat(made["expires_at"]) == soon


async def test_a_viewer_gets_a_viewers_key(app: Application) -> None:
    ada = await member(app, "ada", "viewer")
    begun = await begin(app)
    await approve(app, begun, ada)
    secret = (await poll(app, begun)).json()["secret"]
    assert (await ask(app, "GET", "/api/v1/runs", secret)).status_code == 200
    refused = await ask(app, "POST", "/api/v1/runs", secret, json={"config": {}})
    assert refused.status_code == 403


async def test_the_key_follows_the_role_and_ends_with_the_membership(app: Application) -> None:
    await member(app, "owner", "owner")
    ada = await member(app, "ada", "member")
    begun, later = await begin(app), await begin(app)
    await approve(app, begun, ada)
    await approve(app, later, ada)
    secret = (await poll(app, begun)).json()["secret"]
    await app.services.members.change_role(MAIN, ada.id, "viewer")
    refused = await ask(app, "POST", "/api/v1/runs", secret, json={"config": {}})
    assert refused.status_code == 403
    await app.services.members.remove(MAIN, ada.id)
    assert (await ask(app, "GET", "/api/v1/runs", secret)).status_code == 401
    assert (await poll(app, later)).json()["code"] == "EXPIRED_TOKEN", "the approval went too"


async def test_an_approval_ends_with_the_key_that_gave_it(app: Application) -> None:
    """So a key that was stolen and revoked leaves nothing behind that becomes a key later."""
    ada = await member(app, "ada", "member")
    begun = await begin(app)
    await approve(app, begun, ada)
    await app.services.api_key_issuer.revoke_own(await actor_of(app, ada.api_key))
    assert (await poll(app, begun)).json()["code"] == "ACCESS_DENIED"
    assert await keys_of(app, ada) == 0


async def test_a_key_of_nobody_approves_nothing(app: Application) -> None:
    begun = await begin(app)
    text = await create_api_key(app, "ci", "admin")
    with pytest.raises(Exception, match="belongs to nobody"):
        await app.services.device_logins.approve(begun["user_code"], await actor_of(app, text))


async def guess(logins: DeviceLogins, actor: Actor, count: int) -> int:
    """How many of so many guesses were looked up."""
    looked_up = 0
    for _ in range(count):
        try:
            await logins.find(new_user_code(), actor)
        except NotFound:
            looked_up += 1
        except QuotaExceeded:
            continue
    return looked_up


async def test_guessing_10000_codes_is_throttled(app: Application) -> None:
    ada = await member(app, "ada", "member")
    begun = await begin(app)
    actor = await actor_of(app, ada.api_key)
    assert await guess(app.services.device_logins, actor, 10_000) <= 15
    with pytest.raises(QuotaExceeded, match="too many wrong codes"):
        await app.services.device_logins.approve(begun["user_code"], actor)
    bea = await member(app, "bea", "member")
    assert await approve(app, begun, bea), "others are not kept waiting"


async def test_guesses_at_the_same_time_are_throttled_like_those_one_after_the_other(
    app: Application,
) -> None:
    ada = await member(app, "ada", "member")
    begun, logins = await begin(app), app.services.device_logins
    actor = await actor_of(app, ada.api_key)
    looked_up = await asyncio.gather(*(guess(logins, actor, 1) for _ in range(300)))
    assert sum(looked_up) <= 11
    bea = await member(app, "bea", "member")
    assert await approve(app, begun, bea), "others are not kept waiting"


async def test_right_codes_are_not_counted_as_guesses(app: Application) -> None:
    ada = await member(app, "ada", "member")
    actor = await actor_of(app, ada.api_key)
    begun = await begin(app)
    for _ in range(50):
        await app.services.device_logins.find(begun["user_code"], actor)
    assert await approve(app, begun, ada)


async def test_guesses_of_one_organisation_keep_nobody_of_another_one_waiting(
    app: Application,
) -> None:
    """An owner can make as many people as an organisation may have invitations."""
    await app.database.durable.execute(
        "insert into organisations (id, name, title, created_by) values ('o2', 'mal', 'Mal', 't')"
    )
    logins, looked_up = app.services.device_logins, 0
    for number in range(15):
        mal = await member(app, f"mal{number}", "viewer", organisation="o2")
        looked_up += await guess(logins, await actor_of(app, mal.api_key), 20)
    assert 90 <= looked_up <= 110
    ada = await member(app, "ada", "member")
    assert await approve(app, await begin(app), ada)


async def test_without_the_throttle_each_guess_would_be_looked_up(app: Application) -> None:
    ada = await member(app, "ada", "member")
    services, free = app.services, Rate(per_minute=1e9)
    logins = DeviceLogins(
        DeviceLoginStore(app.database),
        services.people,
        services.recent_api_keys,
        services.clock,
        RequestLimits(each=free),
        RequestLimits(each=free),
    )
    assert await guess(logins, await actor_of(app, ada.api_key), 200) == 200


async def test_requests_without_a_key_are_limited_for_each_address(app: Application) -> None:
    each, _ = DEVICE_LIMITS["authorize"]
    answers = [
        await send(app, "authorize", device_name="d") for _ in range(int(each.per_minute) + 5)
    ]
    statuses = [answer.status_code for answer in answers]
    assert statuses.count(200) <= each.per_minute + 1
    assert statuses[-1] == 429
    assert int(answers[-1].headers["retry-after"]) >= 1
    assert (await send(app, "token", device_code="x")).status_code == 400, "its own limit"
    assert (await app.api.get("/api/v1/runs")).status_code == 200


def test_limits_hold_for_each_sender_and_for_all_together() -> None:
    now = [0.0]
    limits = RequestLimits(each=Rate(2), together=Rate(3), clock=lambda: now[0])
    taken = [limits.take_s(sender) for sender in ("a", "a", "a", "b", "c")]
    assert [not one for one in taken] == [True, True, False, True, False]
    assert taken[2] == 30.0
    now[0] = 30.0
    assert not limits.take_s("a")


@pytest.mark.parametrize("name", ["", " ", "a" * 101, "a\u202eb", "<b>\x07", 7, None])
async def test_a_device_name_that_cannot_be_shown_is_refused(
    app: Application, name: object
) -> None:
    answer = await send(app, "authorize", device_name=name)
    assert answer.status_code == 400
    assert "device_name" in answer.text


@pytest.mark.parametrize("code", ["", "x", "x" * 100_000, "\u00e9", 3])
async def test_a_device_code_that_nobody_was_given_opens_nothing(
    app: Application, code: object
) -> None:
    answer = await send(app, "token", device_code=code)
    assert answer.status_code == 400
    assert answer.json()["code"] in ("EXPIRED_TOKEN", "VALIDATION")


async def test_two_devices_with_one_name_get_keys_with_names_of_their_own(app: Application) -> None:
    ada, bea = await member(app, "ada", "viewer"), await member(app, "bea", "viewer")
    names = []
    for person in (ada, ada, bea):
        begun = await begin(app, "!!!")
        await approve(app, begun, person)
        names.append((await poll(app, begun)).json()["api_key"]["name"])
    assert names[0] == names[2] == "device"
    assert re.fullmatch("device-[0-9a-f]{8}", names[1])


async def test_an_api_key_revokes_itself_without_a_scope(app: Application) -> None:
    for scope in ("inference", "metrics"):
        text = await create_api_key(app, scope, scope)
        answer = await ask(app, "DELETE", "/api/v1/api-keys/self", text)
        assert answer.json()["revoked"] == text.split("_")[1]
        assert (await ask(app, "GET", "/api/v1/whoami", text)).status_code == 401
    refused = await app.api.delete("/api/v1/api-keys/self")
    assert refused.status_code == 403
    assert "change the setting instead" in refused.text
