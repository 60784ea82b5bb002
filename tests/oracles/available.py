"""Where the oracles come from: independent implementations, pinned, and used by tests alone.

TRL and Liger are the extra `[oracles]`. verl pins other versions of what we use and ships a package
called `tests`, so it lies in a directory of its own, `<prefix>/oracles`, made by

    python -m pip install --no-deps --target <prefix>/oracles -r requirements-oracles.txt

and only its files of formulas are imported, with stand-ins for the cluster libraries beside them.
Where an oracle is missing its tests are skipped, on CI they fail.
"""

import importlib
import importlib.machinery
import os
import sys
import types
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest

VERL_DIRECTORY = Path(sys.prefix) / "oracles"
CLUSTER_LIBRARIES = ("ray", "tensordict", "tensordict.tensorclass", "codetiming", "omegaconf")
"""verl imports them next to its formulas (and a reader of settings). No formula uses them."""

PINS = {"trl": "1.16.0", "liger_kernel": "0.8.5"}


def oracle(name: str) -> types.ModuleType:
    """The module `name` of an oracle. Skips the calling module where it is not installed, and raises
    ImportError on CI."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _verl(name) if name.startswith("verl.") else _import_pinned(name)
        except ImportError as error:
            if os.environ.get("CI"):
                raise
            return pytest.skip(f"no oracle {name}: {error}", allow_module_level=True)


def _import_pinned(name: str) -> types.ModuleType:
    package = name.partition(".")[0]
    module = importlib.import_module(name)
    if version(package) != PINS[package]:
        raise ImportError(f"{package} is {version(package)}, the oracle is {PINS[package]}")
    return module


def _verl(name: str) -> types.ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    stand_ins = {lib: _StandIn(lib) for lib in CLUSTER_LIBRARIES if lib not in sys.modules}
    sys.modules.update(stand_ins)
    sys.path.append(str(VERL_DIRECTORY))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(VERL_DIRECTORY))
        for library in stand_ins:
            del sys.modules[library]


class _Anything:
    """Takes the place of a class of a cluster library."""


class _StandIn(types.ModuleType):
    """A module that has every name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__path__: list[str] = []
        self.__version__ = "0"

    def __getattr__(self, name: str) -> type[_Anything]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything
