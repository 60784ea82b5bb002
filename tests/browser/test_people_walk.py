"""The way of people in Chromium: an owner invites, a person joins, and approves a program's login."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from infra.identity.api_key_format import api_key_id, digest
from infra.identity.sessions import Bearer
from infra.ports.actor import MAIN
from producers.core.device_login import DeviceLoginPending, IssuedLogin
from tests.kit.chromium import DESK, PHONE, open_link, violations, visiting
from tests.kit.dashboard import ServedDashboard, served_dashboard
from tests.kit.people import SignedUp, member

pytestmark = [pytest.mark.browser, pytest.mark.postgres]


@pytest.fixture(scope="module")
def dashboard(
    postgres_url: str, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedDashboard]:
    del browser  # it starts after the database and before the server's thread
    with served_dashboard(postgres_url, tmp_path_factory.mktemp("people") / "home") as served:
        yield served


@pytest.fixture(scope="module")
def ada(dashboard: ServedDashboard) -> SignedUp:
    """The first owner."""
    return dashboard.run(member(dashboard.app, "ada", "owner"))


def sign_in_link(dashboard: ServedDashboard, person: SignedUp) -> str:
    bearer = Bearer(str(api_key_id(person.api_key)), digest(person.api_key))
    code = dashboard.run(dashboard.app.services.sessions.issue_code(bearer))
    return f"{dashboard.url}/login?code={code}"


def invitation_link(page: Page, dashboard: ServedDashboard, role: str) -> str:
    """The link of a new invitation, made on the page of members. The server of a test has another port
    than its settings say."""
    page.goto(f"{dashboard.url}/members")
    page.locator("form.filters").last.get_by_label("Role").select_option(role)
    page.get_by_role("button", name="Make a link").click()
    link = page.get_by_label("The link of the invitation").locator("pre").inner_text()
    return f"{dashboard.url}/join?{link.partition('?')[2]}"


async def poll(dashboard: ServedDashboard, device_code: str) -> IssuedLogin | None:
    """The key of a login; None while it waits."""
    app = dashboard.app
    await app.database.durable.execute("update device_logins set polled_at = null")
    try:
        return await app.services.device_logins.poll(device_code)
    except DeviceLoginPending:
        return None


def test_a_person_joins_by_a_link_and_approves_a_login(
    browser: Browser, dashboard: ServedDashboard, ada: SignedUp
) -> None:
    with visiting(browser, dashboard.url) as (context, watch):
        page = context.new_page()
        open_link(page, sign_in_link(dashboard, ada))
        link = invitation_link(page, dashboard, "member")
        watch.assert_nothing()
    logins = dashboard.app.services.device_logins
    begun = dashboard.run(logins.begin("Bea's laptop", "192.0.2.7"))
    with visiting(browser, dashboard.url) as (context, watch):
        page = context.new_page()
        page.goto(link)
        page.get_by_label("Your name").fill("Bea")
        page.get_by_label("Your e-mail address").fill("bea@example.org")
        page.get_by_role("button", name="Join").click()
        expect(page.get_by_role("heading", name="Welcome, Bea")).to_be_visible()
        assert api_key_id(page.locator("pre").inner_text())
        page.goto(f"{dashboard.url}/device")
        page.get_by_label("Code").fill(begun.user_code.lower())
        page.get_by_role("button", name="Continue").click()
        expect(page.get_by_text("Bea's laptop")).to_be_visible()
        expect(page.get_by_text("192.0.2.7")).to_be_visible()
        assert dashboard.run(poll(dashboard, begun.device_code)) is None
        page.get_by_role("button", name="Approve").click()
        expect(page.get_by_role("status").filter(has_text="is signed in")).to_be_visible()
        issued = dashboard.run(poll(dashboard, begun.device_code))
        assert issued is not None
        assert issued.person.email == "bea@example.org"
        page.goto(f"{dashboard.url}/members")
        expect(page.get_by_role("row").filter(has_text="ada@example.org")).to_be_visible()
        expect(page.get_by_role("button", name="Make a link")).to_have_count(0)
        watch.assert_nothing()


def test_an_owner_changes_a_role_and_removes_a_member(
    browser: Browser, dashboard: ServedDashboard, ada: SignedUp
) -> None:
    cleo = dashboard.run(member(dashboard.app, "cleo", "viewer"))
    with visiting(browser, dashboard.url) as (context, watch):
        page = context.new_page()
        open_link(page, sign_in_link(dashboard, ada))
        page.goto(f"{dashboard.url}/members")
        row = page.get_by_role("row").filter(has_text=cleo.email)
        row.get_by_label("Role of cleo").select_option("member")
        row.get_by_role("button", name="Change").click()
        expect(row.get_by_label("Role of cleo")).to_have_value("member")
        found = dashboard.run(dashboard.app.services.members.find(MAIN, cleo.id))
        assert found.role == "member"
        watch.assert_nothing()
        watch.says_yes = True
        row.get_by_role("button", name="Remove").click()
        expect(row).to_have_count(0)
        assert [text.partition("?")[0] for text in watch.dialogs] == ["Remove this member"]


@pytest.mark.parametrize(
    "look",
    [
        {"viewport": DESK, "color_scheme": "light"},
        {"viewport": DESK, "color_scheme": "dark"},
        {"viewport": PHONE, "color_scheme": "light"},
    ],
    ids=["light", "dark", "phone"],
)
def test_axe_finds_nothing_wrong_with_the_pages_of_people(
    browser: Browser, dashboard: ServedDashboard, ada: SignedUp, look: dict[str, object]
) -> None:
    logins = dashboard.app.services.device_logins
    begun = dashboard.run(logins.begin("laptop", "192.0.2.7"))
    with visiting(browser, dashboard.url, **look) as (context, watch):
        page = context.new_page()
        open_link(page, sign_in_link(dashboard, ada))
        link = invitation_link(page, dashboard, "viewer")
        found = {"the link of an invitation": violations(page)}
        for path in ("/members", "/device", f"/device?code={begun.user_code}", "/sessions"):
            page.goto(dashboard.url + path)
            found[path] = violations(page)
            width = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert width <= 0, f"{path} is too wide"
        page.goto(link)
        found["/join"] = violations(page)
        assert not {name: wrong for name, wrong in found.items() if wrong}
        watch.assert_nothing()
