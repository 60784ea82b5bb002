"""A KMS on this machine for tests: it speaks the JSON protocol of AWS KMS over HTTP and checks the
signature of every request. Its keys are made of their names."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

REGION = "eu-central-1"
ACCOUNT = "111122223333"
CREDENTIALS = Credentials("AKIATEST", "secret-of-the-tests")


class _Refusal(Exception):
    """An error of KMS, by its code."""


@dataclass
class FakeKms:
    """A running KMS. `requests` are (operation, body) in order. `refusal` is the code of an error that
    every request gets, or None."""

    url: str
    keys: dict[str, str]
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    refusal: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which boto3 finds it."""
        return {
            "AWS_ENDPOINT_URL_KMS": self.url,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ACCESS_KEY_ID": CREDENTIALS.access_key,
            "AWS_SECRET_ACCESS_KEY": CREDENTIALS.secret_key,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def answer(self, operation: str, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append((operation, body))
        if self.refusal is not None:
            raise _Refusal(self.refusal)
        arn = self._arn(body["KeyId"])
        cipher = AESGCM(hashlib.sha256(arn.encode()).digest())
        context = json.dumps(body.get("EncryptionContext", {}), sort_keys=True).encode()
        match operation:
            case "DescribeKey":
                return {"KeyMetadata": {"Arn": arn, "KeyId": arn.rpartition("/")[2]}}
            case "Encrypt":
                nonce = len(self.requests).to_bytes(12, "big")
                data = nonce + cipher.encrypt(nonce, base64.b64decode(body["Plaintext"]), context)
                return {"KeyId": arn, "CiphertextBlob": base64.b64encode(data).decode()}
            case "Decrypt":
                data = base64.b64decode(body["CiphertextBlob"])
                try:
                    plain = cipher.decrypt(data[:12], data[12:], context)
                except (InvalidTag, ValueError) as error:
                    raise _Refusal("InvalidCiphertextException") from error
                return {"KeyId": arn, "Plaintext": base64.b64encode(plain).decode()}
        raise _Refusal("UnknownOperationException")

    def _arn(self, name: str) -> str:
        key = self.keys.get(name.removeprefix(f"arn:aws:kms:{REGION}:{ACCOUNT}:key/"))
        if key is None:
            raise _Refusal("NotFoundException")
        return f"arn:aws:kms:{REGION}:{ACCOUNT}:key/{key}"


@contextmanager
def fake_kms(**aliases: str) -> Iterator[FakeKms]:
    """A KMS with a key for each alias: `alias/<name>` -> its id."""
    keys = {f"alias/{name}": key for name, key in aliases.items()}
    keys |= {key: key for key in aliases.values()}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            try:
                _check_signature(self, data)
                target = self.headers["X-Amz-Target"]
                assert target.startswith("TrentService."), target
                assert self.headers["Content-Type"] == "application/x-amz-json-1.1"
                status, body = 200, kms.answer(target.partition(".")[2], json.loads(data))
            except _Refusal as refusal:
                status, body = 400, {"__type": str(refusal), "message": "refused"}
            sent = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, format: str, *arguments: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kms = FakeKms(f"http://127.0.0.1:{server.server_port}", keys)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield kms
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _check_signature(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    """Sign the request again, and compare. Raises _Refusal."""
    sent = handler.headers["Authorization"] or ""
    names = sent.partition("SignedHeaders=")[2].partition(",")[0].split(";")
    url = f"http://{handler.headers['Host']}{handler.path}"
    again = AWSRequest("POST", url, headers={n: handler.headers[n] for n in names}, data=data)
    again.context["timestamp"] = handler.headers["X-Amz-Date"]
    signer = SigV4Auth(CREDENTIALS, "kms", REGION)
    text = signer.string_to_sign(again, signer.canonical_request(again))
    if not sent.endswith(f"Signature={signer.signature(text, again)}"):
        raise _Refusal("InvalidSignatureException")
