"""People sign in with a certified OpenID Connect provider in Chromium: by a group, for a program too,
and not any more when the group is gone."""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from infra.operations.local.free_port import free_port
from infra.ports.actor import MAIN
from tests.kit.chromium import DESK, ROOT, violations, visiting
from tests.kit.dashboard import ServedDashboard, served_dashboard
from tests.kit.oidc_provider import environment
from tests.kit.people import member
from tests.kit.postgres import missing

pytestmark = [pytest.mark.browser, pytest.mark.postgres]

PROVIDER = ROOT / ".tools" / "oidc-provider"
SCRIPT = ROOT / "tests" / "browser" / "oidc" / "provider.mjs"
GROUPS = "admins=main:owner,staff=main:member"


@dataclass
class RealProvider:
    """The provider's process, and its issuer."""

    process: subprocess.Popen[str]
    issuer: str

    def set_accounts(self, accounts: Mapping[str, Mapping[str, Any]]) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(accounts) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == "accounts"


@contextmanager
def real_provider(redirect_uri: str) -> Iterator[RealProvider]:
    node = shutil.which("node")
    if node is None or not (PROVIDER / "node_modules").is_dir():
        missing("no oidc-provider: run `make oidc`, which needs npm")
    process = subprocess.Popen(
        [str(node), str(SCRIPT), str(PROVIDER), redirect_uri],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line.startswith("http"), f"the provider did not start: {line}"
        yield RealProvider(process, line)
    finally:
        process.kill()
        process.communicate()


@dataclass(frozen=True)
class Walk:
    """An installation whose people sign in with the provider."""

    dashboard: ServedDashboard
    provider: RealProvider


@pytest.fixture(scope="module")
def walk(
    postgres_url: str, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Walk]:
    del browser  # it starts after the database and before the server's thread
    home, port = tmp_path_factory.mktemp("oidc") / "home", free_port()
    url = f"http://127.0.0.1:{port}"
    with real_provider(f"{url}/sign-in/oidc/callback") as provider:
        environ = environment(provider.issuer, GROUPS, HEADRACE_URL=url)
        with served_dashboard(postgres_url, home, port=port, environ=environ) as dashboard:
            dashboard.run(member(dashboard.app, "owner", "owner"))
            yield Walk(dashboard, provider)


def sign_in(page: Page, walk: Walk, person: str, following: str = "/") -> None:
    """Press the button, and sign in with the provider, whose own pages these are."""
    page.goto(f"{walk.dashboard.url}/login?next={following}")
    page.get_by_role("link", name="Sign in with 127.0.0.1").click()
    page.get_by_placeholder("Enter any login").fill(person)
    page.get_by_placeholder("and password").fill("any")
    page.get_by_role("button", name="Sign-in").click()
    page.get_by_role("button", name="Continue").click()
    page.wait_for_url(lambda url: url.startswith(walk.dashboard.url))


def poll(url: str, device_code: str) -> httpx.Response:
    return httpx.post(f"{url}/api/v1/device/token", json={"device_code": device_code})


def test_a_person_of_a_group_signs_in_approves_a_program_and_is_refused_without_it(
    browser: Browser, walk: Walk
) -> None:
    url = walk.dashboard.url
    walk.provider.set_accounts({"ada": {"email": "ada@example.org", "groups": ["staff"]}})
    begun = httpx.post(f"{url}/api/v1/device/authorize", json={"device_name": "laptop"}).json()
    with visiting(browser, url) as (context, watch):
        page = context.new_page()
        code = begun["user_code"]
        sign_in(page, walk, "ada", f"/device?code={code}")
        expect(page.get_by_text("laptop")).to_be_visible()
        page.get_by_role("button", name="Approve").click()
        expect(page.get_by_role("status").filter(has_text="is signed in")).to_be_visible()
        issued = poll(url, begun["device_code"]).json()
        headers = {"Authorization": f"Bearer {issued['secret']}"}
        who = httpx.get(f"{url}/api/v1/whoami", headers=headers).json()
        assert who["role"] == "member"
        page.goto(f"{url}/members")
        expect(page.get_by_role("row").filter(has_text="ada@example.org")).to_contain_text(
            "member (from groups)"
        )
        walk.provider.set_accounts({"ada": {"email": "ada@example.org", "groups": []}})
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        assert httpx.get(f"{url}/api/v1/whoami", headers=headers).status_code == 200
        page.get_by_role("link", name="Sign in with 127.0.0.1").click()
        expect(page.get_by_text("belong to no organisation here")).to_be_visible()
        assert httpx.get(f"{url}/api/v1/whoami", headers=headers).status_code == 401
        page.goto(f"{url}/members")
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        # The provider's own pages ask for a font of the web, which may not be there.
        assert not [text for text in watch.errors if "net::ERR_" not in text]
        assert not watch.dialogs


def test_axe_finds_nothing_wrong_with_the_pages_of_a_sign_in(browser: Browser, walk: Walk) -> None:
    url = walk.dashboard.url
    walk.provider.set_accounts(
        {"bea": {"email": "bea@example.org", "groups": ["staff"]}, "eve": {"groups": []}}
    )
    with visiting(browser, url, viewport=DESK) as (context, _):
        page = context.new_page()
        page.goto(f"{url}/login")
        found = {"/login": violations(page)}
        sign_in(page, walk, "bea", "/sign-in/organisation")
        expect(page.get_by_role("heading", name="Your organisations")).to_be_visible()
        found["organisations"] = violations(page)
        page.goto(f"{url}/sign-in/oidc/callback?state=used&code=used")
        expect(page.get_by_text("sign in again").first).to_be_visible()
        found["a sign-in that ended"] = violations(page)
    assert not {name: wrong for name, wrong in found.items() if wrong}
    assert walk.dashboard.run(walk.dashboard.app.services.members.find(MAIN, "bea")).from_groups
