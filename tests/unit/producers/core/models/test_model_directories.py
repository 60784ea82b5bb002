"""Which directories of the server `experiment.model_path` may name, and for whom."""

import os
from pathlib import Path

import pytest

from infra.ports.actor import PUSH, Actor, acting_as
from infra.settings.model_directories import OWN_MACHINE, ModelDirectories
from infra.settings.settings import BadSetting, Settings
from producers.core.models.model_ref import local_model
from schemas.errors import InvalidConfig

ADMIN = Actor("root", "admin", frozenset({"admin"}))
SUBMITTER = Actor("t", "ann", frozenset({"submit"}))
BOUND = Actor("b", "admin", frozenset({"admin"}), workspace="w")
PUSHED = Actor(PUSH, "push", frozenset(), workspace="w")


def model(place: Path) -> Path:
    """A model's directory."""
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    return place


def find(path: Path | str, directories: ModelDirectories, actor: Actor) -> str:
    with acting_as(actor):
        return local_model(str(path), seed=0, directories=directories).name


def test_only_directories_below_the_list_are_models(tmp_path: Path) -> None:
    inside, outside = model(tmp_path / "models/a"), model(tmp_path / "other/b")
    listed = ModelDirectories((tmp_path / "models",))
    for actor in (ADMIN, SUBMITTER):
        assert find(inside, listed, actor) == str(inside)
    (tmp_path / "models/link").symlink_to(outside)
    (tmp_path / "models-2").symlink_to(outside)
    for path in (
        outside,
        tmp_path / "models/link",
        tmp_path / "models-2",
        f"{tmp_path}/models/../other/b",
        f"{tmp_path}/models/a/../../other/b",
        tmp_path / "absent",
        "/etc",
    ):
        for actor in (ADMIN, SUBMITTER):
            with pytest.raises(InvalidConfig, match=r"not below a directory|'\.\.'"):
                find(path, listed, actor)


def test_a_listed_directory_that_is_a_link_is_followed(tmp_path: Path) -> None:
    place = model(tmp_path / "disk/a")
    (tmp_path / "models").symlink_to(tmp_path / "disk")
    listed = ModelDirectories((tmp_path / "models",))
    assert find(tmp_path / "models/a", listed, ADMIN) == str(place), "a later link changes nothing"


@pytest.mark.parametrize("actor", [BOUND, PUSHED])
@pytest.mark.parametrize("path", ["/etc", "~", "./x", "/absent", "models/a"])
def test_a_workspaces_api_key_names_no_directory(tmp_path: Path, actor: Actor, path: str) -> None:
    place = model(tmp_path / "models/a")
    if path == "models/a":
        path = str(place)
    for directories in (OWN_MACHINE, ModelDirectories((tmp_path / "models",)), ModelDirectories()):
        with pytest.raises(InvalidConfig, match="an API key of a workspace cannot name"):
            find(path, directories, actor)


def test_without_a_list_an_administrator_of_an_own_machine_names_any(tmp_path: Path) -> None:
    place = model(tmp_path / "a")
    assert find(place, OWN_MACHINE, ADMIN) == str(place)
    assert local_model(str(place), seed=0).name == str(place), "a try-out has no sender"
    for directories, actor in ((OWN_MACHINE, SUBMITTER), (ModelDirectories(), ADMIN)):
        with pytest.raises(InvalidConfig, match="HEADRACE_MODEL_DIRECTORIES"):
            find(place, directories, actor)


def test_the_setting_names_directories_by_absolute_paths(tmp_path: Path) -> None:
    home = {"HEADRACE_HOME": str(tmp_path)}
    assert Settings.load(home).model_directories == OWN_MACHINE
    open_to_all = {**home, "HEADRACE_URL": "http://0.0.0.0:8420"}
    assert Settings.load(open_to_all).model_directories == ModelDirectories()
    two = {**home, "HEADRACE_MODEL_DIRECTORIES": f"/models{os.pathsep}/more"}
    assert Settings.load(two).model_directories.roots == (Path("/models"), Path("/more"))
    assert not Settings.load(two).model_directories.is_alone
    with pytest.raises(BadSetting, match="absolute paths"):
        Settings.load({**home, "HEADRACE_MODEL_DIRECTORIES": "models"})
