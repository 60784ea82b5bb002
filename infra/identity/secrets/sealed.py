"""Secrets that are stored in the database are sealed in an envelope: each value is encrypted with a data
key of its own (AES-256-GCM), and a key that is not in the database wraps the data key.

The envelope names the key that wraps it, so a key can be replaced without touching the values. The owner
and the field are authenticated with both parts, so a value that is moved to another row or column does
not open. Values of the first format were encrypted by the key itself, and they still open.
"""

import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from infra.identity.secrets.key_file import FILE, OLD_FILE, load_key_file, load_old_keys
from infra.identity.secrets.kms import KmsWrapper
from infra.identity.secrets.local import KEY_ID_BYTES, NONCE_BYTES, LocalKey
from infra.ports.secrets import KeyWrapper, WrappedKey
from infra.settings.secret_key import KEY_BYTES, KeySource, KmsKey
from infra.settings.settings import Settings
from schemas.errors import InvalidConfig

DIRECT, FORMAT = b"\x01", b"\x02"
SIZES = struct.Struct(">BH")
"""The lengths of the key's id and of the wrapped data key, which follow the format byte."""

OldKeys = Callable[[], Sequence[KeyWrapper]]

AGAIN = "store it again (a connection: headrace workspace connect; a secret: headrace secret set)"


@dataclass(frozen=True, slots=True)
class _Envelope:
    """A sealed value, in its parts."""

    wrapped: WrappedKey
    nonce: bytes
    encrypted: bytes

    @classmethod
    def parse(cls, sealed: bytes) -> "_Envelope":
        """Take a sealed value apart. Raises ValueError when it is not whole."""
        try:
            id_size, key_size = SIZES.unpack_from(sealed, 1)
            rest = memoryview(sealed)[1 + SIZES.size :]
            key = bytes(rest[:id_size]).decode("ascii")
        except (struct.error, UnicodeDecodeError) as error:
            raise ValueError("not an envelope") from error
        body = bytes(rest[id_size + key_size :])
        if len(body) < NONCE_BYTES:
            raise ValueError("the envelope was cut")
        wrapped = WrappedKey(key, bytes(rest[id_size : id_size + key_size]))
        return cls(wrapped, body[:NONCE_BYTES], body[NONCE_BYTES:])

    def pack(self) -> bytes:
        key, data = self.wrapped.key.encode("ascii"), self.wrapped.data
        return FORMAT + SIZES.pack(len(key), len(data)) + key + data + self.nonce + self.encrypted


class Sealer:
    """Seals and opens secrets with the key `current`. `old_keys` returns the keys before it, which open
    what they sealed."""

    def __init__(self, current: KeyWrapper, old_keys: OldKeys = lambda: ()) -> None:
        self._current = current
        self._old_keys = old_keys
        self._old: Sequence[KeyWrapper] | None = None

    @classmethod
    def of(cls, settings: Settings) -> "Sealer":
        """The sealer of this installation: with HEADRACE_SECRET_KEY, or else with the key file of its
        home, which is made at first use. The keys before it are those of HEADRACE_SECRET_KEYS_OLD and of
        the file secret.key.old."""
        path = settings.home / FILE

        def old_keys() -> Sequence[KeyWrapper]:
            sources = (*settings.old_secret_keys, *load_old_keys(settings.home / OLD_FILE))
            return tuple(map(_wrapper, sources))

        given = settings.secret_key
        current = LocalKey(lambda: load_key_file(path)) if given is None else _wrapper(given)
        return cls(current, old_keys)

    async def key_id(self) -> str:
        """Return the id of the key that seals now. Raises InvalidConfig without a usable key."""
        return await self._current.key_id()

    async def seal(self, value: str, *, owner: str, field: str) -> bytes:
        """Encrypt a value for one field of one owner. Raises InvalidConfig without a usable key."""
        context = _context(owner, field)
        data_key, nonce = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(NONCE_BYTES)
        encrypted = AESGCM(data_key).encrypt(nonce, value.encode(), FORMAT + context.encode())
        wrapped = await self._current.wrap(data_key, context=context)
        return _Envelope(wrapped, nonce, encrypted).pack()

    async def open(self, sealed: bytes, *, owner: str, field: str) -> str:
        """Decrypt a value that was sealed for this field of this owner. Raises InvalidConfig when it
        was sealed with a key that is not here, for another place, or was changed."""
        try:
            if sealed[:1] == DIRECT:
                return (await self._open_direct(sealed, owner, field)).decode()
            if sealed[:1] == FORMAT:
                return await self._open_envelope(_Envelope.parse(sealed), owner, field)
        except (InvalidTag, ValueError) as error:
            raise InvalidConfig(
                f"the secret {field} of {owner} was changed after it was sealed, or belongs to another "
                f"owner; {AGAIN}"
            ) from error
        raise InvalidConfig(
            f"the secret {field} of {owner} has the format {sealed[:1].hex()}, which this version does "
            f"not know; start a newer version, or {AGAIN}"
        )

    def key_of(self, sealed: bytes) -> str:
        """Return the id of the key that wraps the data key of a sealed value. Raises ValueError."""
        return _Envelope.parse(sealed).wrapped.key

    async def rewrap(self, sealed: bytes, *, owner: str, field: str) -> bytes:
        """Return a sealed value whose data key is wrapped by the current key. Raises InvalidConfig."""
        if sealed[:1] != FORMAT:
            value = await self.open(sealed, owner=owner, field=field)
            return await self.seal(value, owner=owner, field=field)
        try:
            envelope = _Envelope.parse(sealed)
        except ValueError as error:
            raise InvalidConfig(f"the secret {field} of {owner} was changed; {AGAIN}") from error
        data_key = await self._unwrap(envelope.wrapped, owner, field)
        wrapped = await self._current.wrap(data_key, context=_context(owner, field))
        return _Envelope(wrapped, envelope.nonce, envelope.encrypted).pack()

    async def _open_envelope(self, envelope: _Envelope, owner: str, field: str) -> str:
        data_key = await self._unwrap(envelope.wrapped, owner, field)
        bound = FORMAT + _context(owner, field).encode()
        return AESGCM(data_key).decrypt(envelope.nonce, envelope.encrypted, bound).decode()

    async def _unwrap(self, wrapped: WrappedKey, owner: str, field: str) -> bytes:
        for wrapper in self._wrappers():
            if await wrapper.knows(wrapped.key):
                try:
                    return await wrapper.unwrap(wrapped, context=_context(owner, field))
                except InvalidConfig as error:
                    raise InvalidConfig(
                        f"the secret {field} of {owner} does not open: {error.message}; {AGAIN}"
                    ) from error
        raise await self._other_key(wrapped.key, owner, field)

    async def _open_direct(self, sealed: bytes, owner: str, field: str) -> bytes:
        header = sealed[: 1 + KEY_ID_BYTES]
        body = sealed[1 + KEY_ID_BYTES :]
        bound = header + _context(owner, field).encode()
        for wrapper in self._wrappers():
            if isinstance(wrapper, LocalKey) and wrapper.fingerprint == header[1:]:
                return AESGCM(wrapper.key).decrypt(body[:NONCE_BYTES], body[NONCE_BYTES:], bound)
        raise await self._other_key(f"local:{header[1:].hex()}", owner, field)

    def _wrappers(self) -> Sequence[KeyWrapper]:
        if self._old is None:
            self._old = self._old_keys()
        return (self._current, *self._old)

    async def _other_key(self, key: str, owner: str, field: str) -> InvalidConfig:
        return InvalidConfig(
            f"the secret {field} of {owner} was sealed with key {key}, and this process has key "
            f"{await self.key_id()}; set HEADRACE_SECRET_KEY to the key that sealed it (without that "
            "setting it is in secret.key of HEADRACE_HOME), add it to HEADRACE_SECRET_KEYS_OLD, or "
            f"{AGAIN}"
        )


def _wrapper(source: KeySource) -> KeyWrapper:
    return KmsWrapper(source.name) if isinstance(source, KmsKey) else LocalKey(lambda: source)


def _context(owner: str, field: str) -> str:
    return f"{len(owner)}/{owner}/{field}"
