"""`headrace workspace alerts`: the targets of alerts, and changes of them."""

from infra.settings.alerts import ALERT_KINDS
from tests.unit.producers.cli.conftest import FakeServer, Run

PATH = "/workspaces/sums/alerts"
TARGET = {
    "id": "at-1",
    "medium": "webhook",
    "shown": "hooks.example.org",
    "kinds": ["failed"],
    "error": "the webhook of hooks.example.org answered 500",
}


def test_targets_are_shown_added_rotated_and_removed(server: FakeServer, headrace: Run) -> None:
    server.answer("GET", PATH, {"workspace": "sums", "targets": [TARGET]})
    server.answer("POST", PATH, {"target": TARGET, "secret": "whsec_x"})
    server.answer("POST", f"{PATH}/at-1/rotate", {"target": "at-1", "secret": "whsec_y"})
    server.answer("DELETE", f"{PATH}/at-1", {"removed": "at-1"})
    shown = headrace("workspace", "alerts", "sums").out
    assert all(text in shown for text in ("at-1", "hooks.example.org", "failed", "answered 500"))
    url = "https://hooks.example.org/x"
    made = headrace("workspace", "alerts", "sums", "--webhook", url, "--on", "failed")
    assert "whsec_x" in made.out
    assert server.requests[-1].document == {
        "medium": "webhook",
        "address": url,
        "kinds": ["failed"],
    }
    assert "whsec_y" in headrace("workspace", "alerts", "sums", "--rotate", "at-1").out
    assert "removed" in headrace("workspace", "alerts", "sums", "--remove", "at-1").out
    both = headrace("workspace", "alerts", "sums", "--rotate", "at-1", "--remove", "at-1")
    assert both.code == 1


def test_a_wrong_kind_is_named_with_its_option(server: FakeServer, headrace: Run) -> None:
    ran = headrace("workspace", "alerts", "sums", "--mail", "a@example.org", "--on", "fialed")
    assert ran.code == 2
    assert all(text in ran.err for text in ("--on", "fialed", *ALERT_KINDS))
    assert server.requests == []
