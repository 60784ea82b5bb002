"""No password is shown, wherever a text quotes one."""

import pytest

from schemas.secrets.redact import redact, redact_setting


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no answer at postgresql://u:hunter2@h:5432/d now", "postgresql://u:***@h:5432/d"),
        ("http://:hunter2@h/", "http://:***@h/"),
        ("host=h password=hunter2 user=u", "host=h password=*** user=u"),
        ("password='hunter2 hunter2' user=u", "password=*** user=u"),
        ("postgresql://h/d?user=u&password=hunter2&x=1", "?user=u&password=***&x=1"),
    ],
)
def test_passwords_are_hidden(text: str, shown: str) -> None:
    assert shown in redact(text)
    assert "hunter2" not in redact(text)


@pytest.mark.parametrize("text", ["http://h:8420/runs/r@3", "mail a@b.org", "git@h:o/r", "plain"])
def test_text_without_a_password_is_unchanged(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    "value",
    [
        "mysql://u:hunter2@h/d",
        "u:hunter2@h",
        "postgres//u:hunter2@h/d",
        "http://u:hunter2/hunter2@h",
        "http://u:hunter2@hunter2@h",
        "mysql://hunter2@h",
    ],
)
def test_a_malformed_setting_hides_whatever_could_be_a_login(value: str) -> None:
    assert "hunter2" not in redact_setting(value)
    assert redact_setting(value).endswith(value.rpartition("@")[2])
