"""The key-encryption key in AWS KMS, which never leaves it. boto3 finds credentials and region as usual.

Each call is a request to KMS, made in a thread. It names the place of the value as encryption context,
so KMS refuses to unwrap a data key for another place, and its audit log says what was opened.
"""

import asyncio
import importlib.util
import threading
from typing import Any

from infra.ports.secrets import WrappedKey
from schemas.errors import InvalidConfig, TransientError

PREFIX = "kms:"
CONTEXT = "headrace"
CONNECT_S, READ_S, ATTEMPTS = 3, 5, 3

TRANSIENT = frozenset(
    {
        "DependencyTimeoutException",
        "KMSInternalException",
        "KeyUnavailableException",
        "LimitExceededException",
        "ThrottlingException",
        "RequestTimeout",
        "ServiceUnavailable",
    }
)
"""Error codes after which a later call may succeed."""

CHANGED = frozenset({"InvalidCiphertextException", "IncorrectKeyException"})


class KmsWrapper:
    """`infra.ports.secrets.KeyWrapper` with a key of KMS: its id, its ARN or an alias."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._made: Any = None
        self._making = threading.Lock()

    async def key_id(self) -> str:
        answer = await self._call("describe_key", KeyId=self._name)
        return f"{PREFIX}{answer['KeyMetadata']['Arn']}"

    async def knows(self, key: str) -> bool:
        return key.startswith(PREFIX)

    async def wrap(self, data_key: bytes, *, context: str) -> WrappedKey:
        answer = await self._call(
            "encrypt", KeyId=self._name, Plaintext=data_key, EncryptionContext={CONTEXT: context}
        )
        return WrappedKey(f"{PREFIX}{answer['KeyId']}", answer["CiphertextBlob"])

    async def unwrap(self, wrapped: WrappedKey, *, context: str) -> bytes:
        answer = await self._call(
            "decrypt",
            KeyId=wrapped.key.removeprefix(PREFIX),
            CiphertextBlob=wrapped.data,
            EncryptionContext={CONTEXT: context},
        )
        plain: bytes = answer["Plaintext"]
        return plain

    async def _call(self, method: str, **arguments: object) -> Any:
        return await asyncio.to_thread(self._send, method, arguments)

    def _send(self, method: str, arguments: dict[str, object]) -> Any:
        """Send one request. Raises InvalidConfig and TransientError, without the request's content."""
        client = self._client()
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        try:
            return getattr(client, method)(**arguments)
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code"))
            if code in TRANSIENT:
                raise TransientError(f"KMS cannot use the key {self._name} now ({code})") from None
            if code in CHANGED:
                raise InvalidConfig(
                    f"a data key does not open with KMS key {self._name} ({code}); it was changed, or "
                    "belongs to another value"
                ) from None
            raise InvalidConfig(
                f"KMS refuses to use the key {self._name} ({code}); allow this process kms:Encrypt, "
                "kms:Decrypt and kms:DescribeKey on it"
            ) from None
        except NoCredentialsError as error:
            raise InvalidConfig(
                "there are no credentials for AWS KMS; set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or any other source that boto3 knows"
            ) from error
        except BotoCoreError as error:
            raise TransientError(f"KMS does not answer ({type(error).__name__})") from error

    def _client(self) -> Any:
        with self._making:
            if self._made is None:
                self._made = _open_client(self._name)
            return self._made


def _open_client(name: str) -> Any:
    if importlib.util.find_spec("boto3") is None:
        raise InvalidConfig(
            "HEADRACE_SECRET_KEY names a key of KMS, but the AWS client is not installed: "
            "pip install 'headrace[s3]'"
        )
    import boto3
    from botocore.config import Config
    from botocore.exceptions import NoRegionError

    parts = name.split(":")
    region = parts[3] if name.startswith("arn:") and len(parts) > 3 else None
    config = Config(
        connect_timeout=CONNECT_S,
        read_timeout=READ_S,
        retries={"total_max_attempts": ATTEMPTS, "mode": "standard"},
    )
    try:
        return boto3.session.Session().client("kms", region_name=region, config=config)
    except NoRegionError as error:
        raise InvalidConfig(
            "no AWS region is set for KMS; set AWS_REGION, or name the key by its ARN"
        ) from error
