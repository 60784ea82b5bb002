"""The directories from which a rollout imports."""

from pathlib import Path

import pytest

from headrace.user_code.import_paths import LARGEST_FILE, InvalidShared, import_paths


def workspace(root: Path, config: str | None) -> Path:
    """Write a workspace with a rollout and two folders of code. Returns the entry point."""
    entry = root / "rollouts" / "say" / "agent" / "main.py"
    for path in (entry, root / "tools" / "plain.py", root / "shared" / "__init__.py"):
        path.parent.mkdir(parents=True)
        path.touch()
    if config is not None:
        (root / "headrace.toml").write_text(config)
    return entry


@pytest.mark.parametrize(
    ("config", "shared"),
    [
        (None, ()),
        ("", ()),
        ("[workspace]\n", ()),
        ('[workspace]\nshared = ["tools"]\n', ("tools",)),
        ('[workspace]\nshared = ["shared/", "tools"]\n', (".", "tools")),
        ('[workspace]\nshared = ["tools", "./tools/"]\n', ("tools",)),
    ],
)
def test_the_rollouts_own_folders_come_before_shared_code(
    tmp_path: Path, config: str | None, shared: tuple[str, ...]
) -> None:
    entry = workspace(tmp_path, config)
    own = [entry.parent, entry.parent.parent]
    assert import_paths(entry) == [str(path) for path in (*own, *(tmp_path / s for s in shared))]


@pytest.mark.parametrize(
    "config",
    [
        "[workspace",
        "workspace = 1",
        '[workspace]\nshared = "tools"\n',
        "[workspace]\nshared = [1]\n",
        '[workspace]\nshared = ["absent"]\n',
        '[workspace]\nshared = ["."]\n',
        '[workspace]\nshared = [".."]\n',
        '[workspace]\nshared = ["/etc"]\n',
        '[workspace]\nshared = ["rollouts/say/agent/main.py"]\n',
        f"[workspace]\nshared = {['tools'] * 17}\n",
        "#" * (LARGEST_FILE + 1),
        "a = " + "[" * 20_000,
    ],
)
def test_other_values_are_refused_with_the_name_of_the_file(tmp_path: Path, config: str) -> None:
    with pytest.raises(InvalidShared, match=r"headrace\.toml"):
        import_paths(workspace(tmp_path, config))


def test_a_link_out_of_the_workspace_is_refused(tmp_path: Path) -> None:
    entry = workspace(tmp_path, '[workspace]\nshared = ["away"]\n')
    (tmp_path / "away").symlink_to("/etc")
    with pytest.raises(InvalidShared, match="away"):
        import_paths(entry)
