"""The settings of the process that serves deployments."""

import pytest

from infra.settings.settings import BadSetting, Settings


def test_without_settings_five_may_be_deployed_on_a_port_of_this_machine() -> None:
    serving = Settings.load({}).serving
    assert (serving.max_deployments, serving.share_percent) == (5, 25)
    assert (serving.host, serving.port) == ("127.0.0.1", 0)


def test_an_address_is_where_it_listens_and_is_reached() -> None:
    serving = Settings.load({"HEADRACE_SERVING_URL": "http://deploy:8424/"}).serving
    assert (serving.host, serving.port) == ("deploy", 8424)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEADRACE_MAX_DEPLOYMENTS", "-1"),
        ("HEADRACE_MAX_DEPLOYMENTS", "65"),
        ("HEADRACE_SERVING_SHARE", "0"),
        ("HEADRACE_SERVING_SHARE", "101"),
        ("HEADRACE_SERVING_SHARE", "a lot"),
        ("HEADRACE_SERVING_URL", "deploy:8424"),
        ("HEADRACE_SERVING_URL", "https://deploy:8424"),
        ("HEADRACE_SERVING_URL", "http://deploy"),
        ("HEADRACE_SERVING_URL", "http://deploy:8424/path"),
        ("HEADRACE_SERVING_URL", "http://deploy:99999"),
    ],
)
def test_a_bad_value_is_named_with_what_it_may_be(name: str, value: str) -> None:
    with pytest.raises(BadSetting, match=f"{name} holds '{value}'; it may hold "):
        Settings.load({name: value})
