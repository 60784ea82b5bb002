"""The settings of alerts."""

import pytest

from infra.settings.alerts import AlertSettings, BadAlertSetting, MailServer

MAIL = {
    "HEADRACE_ALERT_MAIL": "ada@example.org, bob@example.org",
    "HEADRACE_SMTP_URL": "smtp://user:p%40ss@mail.example.org",
}


def test_without_settings_there_are_no_alerts() -> None:
    assert AlertSettings.load({}).channels == ()


def test_a_webhook_and_mail_are_read() -> None:
    found = AlertSettings.load(
        {**MAIL, "HEADRACE_ALERT_WEBHOOK": "https://hooks.example.org/secret-path"}
    )
    assert found.channels == ("webhook", "mail:ada@example.org", "mail:bob@example.org")
    assert found.mail_to == ("ada@example.org", "bob@example.org")
    assert found.mail_from == "headrace@mail.example.org"
    assert found.server == MailServer("mail.example.org", 587, False, "user", "p@ss")
    assert found.stalled_min == 30
    assert "secret-path" not in repr(found)
    assert "p@ss" not in repr(found)


@pytest.mark.parametrize("host", ["127.0.0.1", "[fd00::1]", "mail"])
def test_a_mail_server_is_a_name_or_an_ip_address(host: str) -> None:
    found = AlertSettings.load({**MAIL, "HEADRACE_SMTP_URL": f"smtp://{host}:2525"})
    assert found.server == MailServer(host.strip("[]"), 2525, False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEADRACE_ALERT_WEBHOOK", "ftp://secret"),
        ("HEADRACE_ALERT_WEBHOOK", "https://user:secret@host/"),
        ("HEADRACE_ALERT_WEBHOOK", "https://host:secret/"),
        ("HEADRACE_ALERT_SECRET", "secret"),
        ("HEADRACE_ALERT_SECRET", "whsec_secret"),
        ("HEADRACE_ALERT_MAIL", "secret"),
        ("HEADRACE_ALERT_MAIL", "a@b\nBcc: secret@c"),
        ("HEADRACE_SMTP_URL", "http://user:secret@host"),
        ("HEADRACE_SMTP_URL", "smtp://user:secret@host:port"),
        ("HEADRACE_ALERT_FROM", "secret"),
        ("HEADRACE_ALERT_STALLED_MIN", "secret"),
        ("HEADRACE_ALERT_ALLOW", "secret host"),
    ],
)
def test_a_bad_value_is_refused_without_being_shown(name: str, value: str) -> None:
    with pytest.raises(BadAlertSetting, match=name) as refused:
        AlertSettings.load({**MAIL, name: value})
    assert "secret" not in str(refused.value)


def test_mail_needs_a_server() -> None:
    with pytest.raises(BadAlertSetting, match="HEADRACE_SMTP_URL must be set"):
        AlertSettings.load({"HEADRACE_ALERT_MAIL": "ada@example.org"})
