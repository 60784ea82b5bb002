"""Files that others will run or read: the tree, the SDK, Python's own, and links in their places."""

import os
import sys

from tests.escapes.attacks.attack import Loot, Targets, attack, read, write

TREE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _sdk() -> str:
    return os.path.dirname(os.path.abspath(sys.argv[0]))


@attack()
def change_tree(targets: Targets) -> Loot:
    """Changes the files of its own commit, which its grader and later processes run."""
    for folder, _, names in os.walk(TREE):
        for name in names:
            write(f"{folder}/{name}", "\n# changed", flags=os.O_APPEND)
    return None


@attack()
def add_to_tree(targets: Targets) -> Loot:
    """Adds modules to the directory of its commit, which come before those of the system."""
    for name in ("json.py", "asyncio.py", "sitecustomize.py"):
        write(f"{TREE}/{name}", f"escape = {targets.token!r}\n")
    return None


@attack()
def change_sdk(targets: Targets) -> Loot:
    """Changes the SDK, which runs in every sandbox."""
    for name in os.listdir(_sdk()):
        write(f"{_sdk()}/{name}", "\n# changed", flags=os.O_APPEND)
    return None


@attack()
def bytecode(targets: Targets) -> Loot:
    """Leaves compiled files that Python prefers to the source."""
    for place in (TREE, _sdk(), targets.neighbour_tree):
        try:
            os.makedirs(f"{place}/__pycache__", exist_ok=True)
        except OSError:
            continue
        write(f"{place}/__pycache__/host.cpython-311.pyc", targets.token)
    return None


@attack()
def change_environment(targets: Targets) -> Loot:
    """Changes the environment with its packages, which later runs and graders start."""
    for folder, names, files in os.walk(sys.prefix):
        own = [f"{folder}/{name}" for name in (*names, *files)]
        for path in (path for path in own if not os.path.islink(path)):
            try:
                os.chmod(path, 0o777)
            except OSError:
                continue
            write(path, "\n# changed", flags=os.O_APPEND)
        write(f"{folder}/escape.pth", f"escape = {targets.token!r}\n")
    return None


@attack()
def path_files(targets: Targets) -> Loot:
    """Leaves files that Python runs at each start in every directory of its path."""
    for place in (*sys.path, f"{targets.outside}/environment", os.path.dirname(os.__file__)):
        for name in ("sitecustomize.py", "usercustomize.py", f"{targets.name('path_files')}.pth"):
            if os.path.isdir(place):
                write(f"{place}/{name}", f"escape = {targets.token!r}\n")
    return None


@attack()
def home_files(targets: Targets) -> Loot:
    """Leaves files that shells and programs read at each start in the home directories."""
    for home in (targets.home, os.path.expanduser("~"), "/root"):
        for name in (".bashrc", ".profile", ".pythonrc", ".gitconfig", ".ssh/authorized_keys"):
            if home != "/tmp":
                write(f"{home}/{name}", f"# {targets.name('home_files')}\n", flags=os.O_APPEND)
    return None


@attack()
def change_neighbour(targets: Targets) -> Loot:
    """Changes the code of another rollout."""
    for folder, _, names in os.walk(targets.neighbour_tree):
        for name in names:
            write(f"{folder}/{name}", "\n# changed", flags=os.O_APPEND)
    return None


@attack()
def environment_of_rollout(targets: Targets) -> Loot:
    """Changes the installed packages, which other runs use."""
    for folder, _, names in os.walk(f"{targets.outside}/environment"):
        for name in names:
            write(f"{folder}/{name}", "changed")
    return None


@attack()
def links_in_tree(targets: Targets) -> Loot:
    """Replaces a file of its commit by a link to a file outside."""
    for name in os.listdir(TREE):
        try:
            os.rename(f"{TREE}/{name}", f"{TREE}/{name}.former")
            os.symlink(f"{targets.outside}/public", f"{TREE}/{name}")
        except OSError:
            continue
    return None


@attack()
def links_for_platform(targets: Targets) -> Loot:
    """Leaves links where the platform makes its directories for code, which it removes one day."""
    for place in (targets.temporary, "/tmp"):
        try:
            os.symlink(targets.outside, f"{place}/headrace-code-{targets.token}")
        except OSError:
            continue
    return None


@attack()
def hard_links(targets: Targets) -> Loot:
    """Makes second names of files that it may not keep."""
    for source in (f"{targets.home}/token", f"{targets.outside}/public"):
        for place in (targets.temporary, "/tmp"):
            try:
                os.link(source, f"{place}/{targets.name('hard_links')}")
            except OSError:
                continue
    return read(f"/tmp/{targets.name('hard_links')}")


@attack()
def replace_directory(targets: Targets) -> Loot:
    """Puts another directory in the place of the one with the code."""
    top = os.path.dirname(os.path.dirname(TREE))
    try:
        os.rename(top, f"{top}.former")
    except OSError:
        return None
    os.makedirs(top)
    return None


@attack()
def change_modes(targets: Targets) -> Loot:
    """Makes files of the platform writable for all."""
    for path in (TREE, _sdk(), targets.neighbour_tree, f"{targets.outside}/public", targets.home):
        try:
            os.chmod(path, 0o777)
        except OSError:
            continue
    return None
