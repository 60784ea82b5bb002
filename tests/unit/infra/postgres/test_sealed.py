"""Sealed secrets open only for the workspace and field that they were sealed for, and only with the key
that sealed them."""

import base64
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.postgres.sealed import Sealer, load_key_file
from infra.settings.secret_key import parse_key
from infra.settings.settings import BadSetting, Settings
from schemas.errors import InvalidConfig

KEY = bytes(range(32))


def sealer(key: bytes = KEY) -> Sealer:
    return Sealer(lambda: key)


def test_a_sealed_value_opens_in_its_place() -> None:
    sealed = sealer().seal("hush", workspace="w", field="secret")
    assert b"hush" not in sealed
    assert sealer().open(sealed, workspace="w", field="secret") == "hush"
    assert sealed != sealer().seal("hush", workspace="w", field="secret")


@pytest.mark.parametrize(("workspace", "field"), [("x", "secret"), ("w", "credential")])
def test_a_sealed_value_cannot_be_moved(workspace: str, field: str) -> None:
    sealed = sealer().seal("hush", workspace="w", field="secret")
    with pytest.raises(InvalidConfig, match="belongs to another workspace"):
        sealer().open(sealed, workspace=workspace, field=field)


def test_every_changed_byte_is_noticed() -> None:
    sealed = sealer().seal("hush", workspace="w", field="secret")
    for place in range(len(sealed)):
        changed = bytearray(sealed)
        changed[place] ^= 1
        with pytest.raises(InvalidConfig):
            sealer().open(bytes(changed), workspace="w", field="secret")


@pytest.mark.parametrize("length", [0, 1, 5, 16, 17, 30])
def test_a_value_that_was_cut_does_not_open(length: int) -> None:
    sealed = sealer().seal("hush", workspace="w", field="secret")[:length]
    with pytest.raises(InvalidConfig):
        sealer().open(sealed, workspace="w", field="secret")


def test_another_key_is_named_with_the_setting() -> None:
    sealed = sealer().seal("hush", workspace="w", field="secret")
    with pytest.raises(InvalidConfig, match="set HEADRACE_SECRET_KEY to the key") as refused:
        sealer(bytes(32)).open(sealed, workspace="w", field="secret")
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


def test_the_key_file_is_made_at_first_use_and_is_private(tmp_path: Path) -> None:
    home = tmp_path / "home"
    mine = Sealer.of(Settings.load({"HEADRACE_HOME": str(home)}))
    assert not home.exists()
    sealed = mine.seal("hush", workspace="w", field="secret")
    [made] = home.iterdir()
    assert made.name == "secret.key"
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    again = Sealer.of(Settings.load({"HEADRACE_HOME": str(home)}))
    assert again.open(sealed, workspace="w", field="secret") == "hush"


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
