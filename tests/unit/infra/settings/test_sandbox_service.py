"""The address and the certificates of a sandbox service elsewhere."""

from pathlib import Path

import pytest

from infra.sandbox.service.child import ChildService
from infra.sandbox.service.connect import RemoteService, service_of
from infra.settings.sandbox_service import CA, CERT, FORMER_KEY, KEY, SandboxCertificates
from infra.settings.settings import BadSetting, Settings
from schemas.errors import InvalidConfig
from tests.kit.sandbox_certificates import tls_variables

URL = "tcp://sandbox:8422"


def load(home: Path, **environ: str) -> Settings:
    return Settings.load({"HEADRACE_HOME": str(home), **environ})


def test_without_an_address_each_process_has_a_service_of_its_own(tmp_path: Path) -> None:
    settings = load(tmp_path, **tls_variables("client"))
    assert settings.sandbox_service is None
    assert isinstance(service_of(settings), ChildService)


def test_with_an_address_a_process_uses_that_service(tmp_path: Path) -> None:
    settings = load(tmp_path, HEADRACE_SANDBOX_URL=URL, **tls_variables("client"))
    service = service_of(settings)
    assert isinstance(service, RemoteService)
    assert service.name == "the sandbox service at sandbox:8422"
    assert "PRIVATE KEY" not in repr(settings)


def test_certificates_are_the_same_as_text_in_one_line_and_in_files(tmp_path: Path) -> None:
    text = tls_variables("client")
    expected = SandboxCertificates.load(text)
    lines = SandboxCertificates.load({n: v.replace("\n", "\\n") for n, v in text.items()})
    files = {name: tmp_path / name for name in text}
    for name, path in files.items():
        path.write_text(text[name])
    read = SandboxCertificates.load({name: str(path) for name, path in files.items()})
    for found in (lines, read):
        assert found.certificate.strip() == expected.certificate.strip()
        assert found.key.strip() == expected.key.strip()
        assert found.authority.strip() == expected.authority.strip()
    assert (read.key_file, lines.key_file) == (files[KEY], None)


@pytest.mark.parametrize(
    ("url", "changed", "says"),
    [
        ("http://sandbox:8422", {}, "tcp://host:port"),
        ("tcp://sandbox", {}, "tcp://host:port"),
        ("tcp://sandbox:0", {}, "tcp://host:port"),
        ("tcp://sandbox:99999", {}, "tcp://host:port"),
        ("tcp://:8422", {}, "tcp://host:port"),
        ("tcp://sandbox:8422/path", {}, "tcp://host:port"),
        ("tcp://user:hunter2@sandbox:8422", {}, "tcp://host:port"),
        (URL, {CERT: ""}, f"{CERT} is not set; a sandbox service and its clients need"),
        (URL, {KEY: ""}, f"{KEY} is not set;"),
        (URL, {CA: ""}, f"{CA} is not set;"),
        (URL, {KEY: "hunter2"}, f"{KEY} holds neither PEM text nor the path"),
        (URL, {KEY: "/"}, f"{KEY} holds neither PEM text nor the path"),
        (
            URL,
            {CERT: "", FORMER_KEY: "hunter2"},
            f"{CERT} is not set, and {FORMER_KEY} is not read any more; a sandbox service and its "
            "clients need certificates of one authority (make them with: sh deploy/make_certificates.sh",
        ),
    ],
)
def test_a_bad_value_is_one_line_that_shows_no_key(
    tmp_path: Path, url: str, changed: dict[str, str], says: str
) -> None:
    with pytest.raises(BadSetting, match="HEADRACE_SANDBOX_") as raised:
        load(tmp_path, HEADRACE_SANDBOX_URL=url, **{**tls_variables("client"), **changed})
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "hunter2" not in str(raised.value)
    assert "PRIVATE KEY" not in str(raised.value)


def test_certificates_that_do_not_belong_together_are_an_error_of_the_settings(
    tmp_path: Path,
) -> None:
    mixed = {**tls_variables("client"), KEY: tls_variables("service")[KEY]}
    settings = load(tmp_path, HEADRACE_SANDBOX_URL=URL, **mixed)
    with pytest.raises(InvalidConfig, match="cannot be used together"):
        service_of(settings)
