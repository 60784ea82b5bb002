"""The directories of the server below which `experiment.model_path` may name a model."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from infra.settings.git import THIS_MACHINE
from infra.settings.vllm import BadValue

VARIABLE = "HEADRACE_MODEL_DIRECTORIES"
FETCHED, DEQUANTIZED = "models", "dequantized"
"""The directories of a home for fetched models, and for what is read from GGUF files."""


@dataclass(frozen=True, slots=True)
class ModelDirectories:
    """The operator's list. Without one, `is_alone` says whether the server is reached from its own
    machine only, whose user can read every directory anyway."""

    roots: tuple[Path, ...] = ()
    is_alone: bool = False

    @classmethod
    def load(cls, environ: Mapping[str, str], *, urls: tuple[str, ...]) -> "ModelDirectories":
        """Read the environment. `urls` are the addresses of the API. Raises BadValue."""
        value = environ.get(VARIABLE) or ""
        roots = tuple(Path(part) for part in value.split(os.pathsep) if part)
        if not all(root.is_absolute() for root in roots):
            raise BadValue(VARIABLE, value, "absolute paths of directories with ':' between them")
        is_alone = all((urlsplit(url).hostname or "") in THIS_MACHINE for url in urls)
        return cls(roots, is_alone and not roots)

    def holds(self, directory: Path) -> bool:
        """Whether a directory is below one of the list, after all links of both were followed."""
        place = directory.resolve()
        return any(place.is_relative_to(root.resolve()) for root in self.roots)


OWN_MACHINE = ModelDirectories(is_alone=True)
"""Any directory: the server of one user."""
