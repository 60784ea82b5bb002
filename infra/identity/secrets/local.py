"""The key-encryption key that this process holds itself, from a file or from its environment."""

import secrets
from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256, Hash

from infra.ports.secrets import WrappedKey
from schemas.errors import InvalidConfig

KEY_ID_BYTES = 4
NONCE_BYTES = 12
PREFIX = "local:"


class LocalKey:
    """`infra.ports.secrets.KeyWrapper` with AES-256-GCM, under the key that `load` returns. The key is
    loaded at first use, and `load` may raise InvalidConfig."""

    def __init__(self, load: Callable[[], bytes]) -> None:
        self._load = load
        self._key: bytes | None = None

    async def key_id(self) -> str:
        return f"{PREFIX}{self.fingerprint.hex()}"

    async def knows(self, key: str) -> bool:
        return key.startswith(PREFIX) and key == await self.key_id()

    async def wrap(self, data_key: bytes, *, context: str) -> WrappedKey:
        nonce = secrets.token_bytes(NONCE_BYTES)
        data = AESGCM(self.key).encrypt(nonce, data_key, context.encode())
        return WrappedKey(await self.key_id(), nonce + data)

    async def unwrap(self, wrapped: WrappedKey, *, context: str) -> bytes:
        nonce, data = wrapped.data[:NONCE_BYTES], wrapped.data[NONCE_BYTES:]
        try:
            return AESGCM(self.key).decrypt(nonce, data, context.encode())
        except (InvalidTag, ValueError) as error:
            raise InvalidConfig(
                f"a data key does not open with key {await self.key_id()}; it was changed, or belongs "
                "to another value"
            ) from error

    @property
    def fingerprint(self) -> bytes:
        """The first bytes of a hash of the key."""
        hashed = Hash(SHA256())
        hashed.update(b"headrace secret key\0" + self.key)
        return hashed.finalize()[:KEY_ID_BYTES]

    @property
    def key(self) -> bytes:
        """The key itself, which values of the first format were sealed with directly."""
        if self._key is None:
            self._key = self._load()
        return self._key
