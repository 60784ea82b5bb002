"""The names of datasets that are generated: `reasoning-gym:chain_sum?max_terms=3&size=500`.

Such a name in a TOML says how the rows are made. They are made once, by a client, and uploaded as the
dataset `dataset_name`, which contains the hash of everything that the rows depend on. So one name means
the same rows for as long as the dataset exists, on every server.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

from schemas.errors import InvalidConfig

SCHEME = "reasoning-gym:"
PACKAGE = "reasoning-gym==0.1.25"
REQUIREMENTS = (PACKAGE, "python-dateutil>=2.9")
OVERRIDES = tuple(f"{name}; python_version < '3'" for name in ("cellpylib", "pycosat", "zss"))
"""The packages to generate and to score with. Those in OVERRIDES have no wheel and are left out; they
would bring python-dateutil along."""

TASK = re.compile(r"[a-z0-9_]{1,64}")
DEFAULT_SIZE, LEAST_SIZE, MOST_SIZE = 500, 4, 100_000
MOST_SEED = 2**31 - 1
LONGEST = 2_000
EXAMPLE = f"{SCHEME}chain_sum?max_terms=3&size=500"

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")


@dataclass(frozen=True, slots=True)
class GeneratedTasks:
    """The meaning of a name: the task, its parameters as JSON text with sorted keys, and which rows."""

    task: str
    parameters: str
    split: Split
    size: int
    seed: int

    @property
    def request(self) -> dict[str, object]:
        """The request that `headrace/reasoning_tasks.py` reads."""
        return {
            "package": PACKAGE,
            "task": self.task,
            "parameters": json.loads(self.parameters),
            "split": self.split,
            "size": self.size,
            "seed": self.seed,
        }

    @property
    def dataset_name(self) -> str:
        """The name of the dataset with these rows."""
        digest = hashlib.sha256(json.dumps(self.request, sort_keys=True).encode()).hexdigest()
        return f"reasoning-gym.{self.task}.{self.split}.{digest[:16]}"


def is_generated(ref: str) -> bool:
    """Whether a dataset of a config is generated, and not named."""
    return ref.startswith(SCHEME)


def parse_generated(ref: str) -> GeneratedTasks:
    """Read `reasoning-gym:TASK?key=value&...`. Values are JSON, or text without quotes. `size`, `seed`
    and `split` are ours, and the other keys are parameters of the task. Raises InvalidConfig."""
    if len(ref) > LONGEST:
        raise InvalidConfig(
            f"the dataset {ref[:80]!r}... has {len(ref)} characters; write at most {LONGEST}"
        )
    task, _, query = ref.removeprefix(SCHEME).partition("?")
    if not is_generated(ref) or TASK.fullmatch(task) is None:
        raise InvalidConfig(f"{ref!r} does not name a task; write it like {EXAMPLE}")
    values: dict[str, object] = {}
    for part in filter(None, query.split("&")):
        key, equals, text = part.partition("=")
        if not equals or not key.isidentifier():
            raise InvalidConfig(f"{part!r} in {ref!r} is not key=value; write it like {EXAMPLE}")
        if key in values:
            raise InvalidConfig(f"{key} occurs twice in {ref!r}; keep one of them")
        values[key] = _value(unquote(text))
    size = _whole(ref, values, "size", DEFAULT_SIZE, least=LEAST_SIZE, most=MOST_SIZE)
    seed = _whole(ref, values, "seed", 0, least=0, most=MOST_SEED)
    return GeneratedTasks(
        task=task,
        split=_split(ref, values.pop("split", "train")),
        size=size,
        seed=seed,
        parameters=json.dumps(values, sort_keys=True),
    )


def _value(text: str) -> object:
    try:
        return json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text


def _split(ref: str, value: object) -> Split:
    for split in SPLITS:
        if value == split:
            return split
    raise InvalidConfig(f"split in {ref!r} is {value!r}; use one of: {', '.join(SPLITS)}")


def _whole(
    ref: str, values: dict[str, object], key: str, default: int, *, least: int, most: int
) -> int:
    value = values.pop(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidConfig(
            f"{key} in {ref!r} is {str(value)[:40]}; write a whole number from {least} to {most}"
        )
    return value


def dataset_name(ref: str) -> str:
    """The name under which a dataset of a config is registered. Raises InvalidConfig."""
    return parse_generated(ref).dataset_name if is_generated(ref) else ref


def how_to_generate(ref: str) -> str:
    """The command to run when a generated dataset is not on the server."""
    return f"generate it once with `headrace dataset generate '{ref}'`"
