"""What the `pyproject.toml` of a rollout may ask for."""

import io
import tarfile

import pytest

from infra.ports.packages import DeclaredPackages
from infra.sandbox.environments.declarations import read_declared
from schemas.errors import Refused
from schemas.toml.untrusted import MOST_BYTES

HEAD = '[project]\nname = "x"\nversion = "0"\n'


def read(text: str, lock: str | None = None) -> DeclaredPackages | None:
    """Read a pyproject of a rollout x from a snapshot."""
    files = {"rollouts/x/pyproject.toml": text}
    if lock is not None:
        files["rollouts/x/uv.lock"] = lock
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content.encode())
            tar.addfile(member, io.BytesIO(content.encode()))
    with tarfile.open(fileobj=io.BytesIO(data.getvalue())) as tar:
        assert read_declared(tar, "absent") is None
        return read_declared(tar, "x")


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"{HEAD}dependencies = []\n",
        f'{HEAD}dependencies = ["headrace"]\n',
        '[project.optional-dependencies]\ndev = ["pytest"]\n',
        '[tool.poetry.dependencies]\npython = ">=3.11"\n',
    ],
)
def test_a_rollout_without_packages_needs_no_environment(text: str) -> None:
    assert read(text) is None


def test_names_versions_and_harmless_options_are_taken() -> None:
    found = read(
        f'{HEAD}requires-python = ">=3.12"\ndependencies = ["httpx[http2]>=0.28; '
        "python_version >= '3.11'\"]\n"
        '[build-system]\nbuild-backend = "evil"\nrequires = ["evil"]\nbackend-path = ["."]\n'
        '[tool.uv]\noverride-dependencies = ["idna>=3"]\nprerelease = "allow"\n',
        lock="version = 1\n",
    )
    assert found is not None
    assert found.requires_python == ">=3.12"
    assert found.overrides == ("idna>=3",)
    assert found.prerelease == "allow"
    assert found.lock == "version = 1\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[project", "is not valid TOML"),
        ("a = " + "[" * 20_000, "levels deep"),
        ("[tool.x]\n" + "a." * 32_000 + "a = 1", "levels deep"),
        (f"{HEAD}x = inf\n", "must be a finite number"),
        ("#" * (MOST_BYTES + 1), "has more than 64 KiB"),
        ("#" * (1 << 20), "has more than 64 KiB"),
        ('[project]\ndynamic = ["dependencies"]\n', "dynamic dependencies"),
        ('[tool.poetry.dependencies]\nnumpy = "*"\n', "tool.poetry.dependencies"),
        (f'{HEAD}dependencies = ["a @ file:///etc"]\n', "from a path, URL or repository"),
        (
            f'{HEAD}dependencies = ["a @ git+https://x.example/a"]\n',
            "from a path, URL or repository",
        ),
        (
            f'{HEAD}dependencies = ["a @ https://x.example/a.whl"]\n',
            "from a path, URL or repository",
        ),
        (f'{HEAD}dependencies = ["../other"]\n', "is not a requirement"),
        (f'{HEAD}dependencies = ["-e ."]\n', "is not a requirement"),
        (f'{HEAD}dependencies = ["--no-binary=:all:"]\n', "is not a requirement"),
        (f'{HEAD}dependencies = "numpy"\n', "not a list of texts"),
        (f"{HEAD}dependencies = {['a'] * 501}\n", "more than 500"),
        (f'{HEAD}requires-python = "three"\n', "requires-python = 'three'"),
        (f"{HEAD}[tool.uv.sources]\na = {{ path = '../a', editable = true }}\n", "tool.uv.sources"),
        (f"{HEAD}[[tool.uv.index]]\nurl = 'https://x.example'\n", "tool.uv.index"),
    ],
)
def test_a_requirement_that_cannot_be_installed_is_refused_by_name(text: str, says: str) -> None:
    with pytest.raises(Refused, match=r"rollouts/x/pyproject\.toml") as refused:
        read(text)
    assert says in str(refused.value)
