"""The certificates of a sandbox service and its clients, made by the operator's own script."""

import ssl
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from infra.sandbox.service.tls import make_context
from infra.settings.sandbox_service import VARIABLES, SandboxCertificates

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "make_certificates.sh"


@cache
def made_files(authority: str = "ours") -> dict[str, str]:
    """The files of a folder that the script made, by name. Each `authority` is another folder."""
    with tempfile.TemporaryDirectory(prefix=authority) as folder:
        subprocess.run(["sh", SCRIPT, folder, "client"], check=True)
        return {path.name: path.read_text() for path in Path(folder).iterdir()}


def tls_variables(end: str, *, authority: str = "ours") -> dict[str, str]:
    """The settings of `service` or `client`, as text."""
    files = made_files(authority)
    return dict(
        zip(VARIABLES, (files[f"{end}.pem"], files[f"{end}.key"], files["ca.pem"]), strict=True)
    )


def tls_context(end: str, *, authority: str = "ours") -> ssl.SSLContext:
    """The TLS context of `service` or `client`."""
    certificates = SandboxCertificates.load(tls_variables(end, authority=authority))
    return make_context(certificates, is_service=end == "service")
