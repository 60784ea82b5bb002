"""Sealed secrets open only for the workspace and field that they were sealed for, and only with the key
that sealed them."""

import base64
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from infra.identity.secrets.key_file import load_key_file
from infra.identity.secrets.local import LocalKey
from infra.identity.secrets.sealed import Sealer
from infra.settings.secret_key import KmsKey, parse_key
from infra.settings.settings import BadSetting, Settings
from schemas.errors import InvalidConfig

KEY = bytes(range(32))


def sealer(key: bytes = KEY) -> Sealer:
    return Sealer(LocalKey(lambda: key))


async def test_a_sealed_value_opens_in_its_place() -> None:
    sealed = await sealer().seal("hush", owner="w", field="secret")
    assert b"hush" not in sealed
    assert await sealer().open(sealed, owner="w", field="secret") == "hush"
    assert sealed != await sealer().seal("hush", owner="w", field="secret")


@pytest.mark.parametrize(("workspace", "field"), [("x", "secret"), ("w", "credential")])
async def test_a_sealed_value_cannot_be_moved(workspace: str, field: str) -> None:
    sealed = await sealer().seal("hush", owner="w", field="secret")
    with pytest.raises(InvalidConfig, match="belongs to another value"):
        await sealer().open(sealed, owner=workspace, field=field)


async def test_every_changed_byte_is_noticed() -> None:
    sealed = await sealer().seal("hush", owner="w", field="secret")
    for place in range(len(sealed)):
        changed = bytearray(sealed)
        changed[place] ^= 1
        with pytest.raises(InvalidConfig):
            await sealer().open(bytes(changed), owner="w", field="secret")


@pytest.mark.parametrize("length", [0, 1, 5, 16, 17, 30])
async def test_a_value_that_was_cut_does_not_open(length: int) -> None:
    sealed = (await sealer().seal("hush", owner="w", field="secret"))[:length]
    with pytest.raises(InvalidConfig):
        await sealer().open(sealed, owner="w", field="secret")


async def test_another_key_is_named_with_the_setting() -> None:
    sealed = await sealer().seal("hush", owner="w", field="secret")
    with pytest.raises(InvalidConfig, match="set HEADRACE_SECRET_KEY to the key") as refused:
        await sealer(bytes(32)).open(sealed, owner="w", field="secret")
    assert KEY.hex() not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        KEY.hex(),
        KEY.hex().upper(),
        base64.b64encode(KEY).decode(),
        base64.b64encode(KEY).decode().rstrip("="),
        base64.urlsafe_b64encode(KEY).decode(),
    ],
)
def test_a_key_is_hex_or_base64(text: str) -> None:
    assert parse_key(text) == KEY
    assert Settings.load({"HEADRACE_SECRET_KEY": text}).secret_key == KEY


@pytest.mark.parametrize("text", ["secret", KEY.hex()[:-2], KEY.hex() + "00", "é" * 64, "!" * 44])
def test_a_bad_key_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(BadSetting, match="HEADRACE_SECRET_KEY") as refused:
        Settings.load({"HEADRACE_SECRET_KEY": text})
    assert text not in str(refused.value)


def test_the_settings_do_not_show_the_key() -> None:
    shown = repr(Settings.load({"HEADRACE_SECRET_KEY": KEY.hex()}))
    assert KEY.hex() not in shown
    assert repr(KEY) not in shown


async def test_the_key_file_is_made_at_first_use_and_is_private(tmp_path: Path) -> None:
    home = tmp_path / "home"
    mine = Sealer.of(Settings.load({"HEADRACE_HOME": str(home)}))
    assert not home.exists()
    sealed = await mine.seal("hush", owner="w", field="secret")
    [made] = home.iterdir()
    assert made.name == "secret.key"
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    again = Sealer.of(Settings.load({"HEADRACE_HOME": str(home)}))
    assert await again.open(sealed, owner="w", field="secret") == "hush"


def test_processes_that_make_the_key_file_at_once_get_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        keys = list(pool.map(load_key_file, [tmp_path / "secret.key"] * 64))
    assert len(set(keys)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["secret.key"]


def test_a_damaged_key_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "secret.key").write_text("gibberish")
    with pytest.raises(InvalidConfig, match="it does not hold a key") as refused:
        load_key_file(tmp_path / "secret.key")
    assert "gibberish" not in str(refused.value)


def test_a_key_file_that_others_may_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "secret.key"
    path.write_text(KEY.hex())
    path.chmod(0o644)
    assert load_key_file(path) == KEY
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_value_of_the_first_format_opens_and_becomes_an_envelope() -> None:
    """It was encrypted by the key itself, as versions before the envelope did."""
    header = b"\x01" + LocalKey(lambda: KEY).fingerprint
    nonce = bytes(12)
    sealed = header + nonce + AESGCM(KEY).encrypt(nonce, b"hush", header + b"1/w/secret")
    assert await sealer().open(sealed, owner="w", field="secret") == "hush"
    with pytest.raises(InvalidConfig, match="HEADRACE_SECRET_KEYS_OLD"):
        await sealer(bytes(32)).open(sealed, owner="w", field="secret")
    both = Sealer(LocalKey(lambda: bytes(32)), lambda: [LocalKey(lambda: KEY)])
    moved = await both.rewrap(sealed, owner="w", field="secret")
    assert moved[:1] == b"\x02"
    assert await sealer(bytes(32)).open(moved, owner="w", field="secret") == "hush"


async def test_old_keys_come_from_the_setting_and_from_the_old_file(tmp_path: Path) -> None:
    first, second, third = (bytes([number]) * 32 for number in range(3))
    sealed = [await sealer(key).seal("hush", owner="w", field="s") for key in (first, second)]
    (tmp_path / "secret.key.old").write_text(f"{second.hex()}\n")
    environment = {
        "HEADRACE_HOME": str(tmp_path),
        "HEADRACE_SECRET_KEY": third.hex(),
        "HEADRACE_SECRET_KEYS_OLD": f"{first.hex()}, kms:alias/none",
    }
    ours = Sealer.of(Settings.load(environment))
    assert [await ours.open(one, owner="w", field="s") for one in sealed] == ["hush"] * 2


def test_a_key_of_kms_is_named() -> None:
    settings = Settings.load({"HEADRACE_SECRET_KEY": "kms:alias/headrace"})
    assert settings.secret_key == KmsKey("alias/headrace")
    with pytest.raises(BadSetting, match="HEADRACE_SECRET_KEY holds no key"):
        Settings.load({"HEADRACE_SECRET_KEY": "kms:"})
    with pytest.raises(BadSetting, match="HEADRACE_SECRET_KEYS_OLD") as refused:
        Settings.load({"HEADRACE_SECRET_KEYS_OLD": f"{KEY.hex()},gibberish"})
    assert KEY.hex() not in str(refused.value)
    assert "gibberish" not in str(refused.value)
