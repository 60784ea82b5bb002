"""Tasks of the package `reasoning-gym`: rows from its generators, and its scorers.

`python -m headrace.reasoning_tasks REQUEST` writes the rows of a dataset (JSON Lines) into `rows.jsonl`
of the current directory. REQUEST is a JSON object with `package`, `task`, `parameters`, `split`, `size`
and `seed`. It needs an environment that has the package. When the request cannot be fulfilled, it writes
the reason into `refused.txt` and exits with 1.

A row holds the question, the answer if it is a text, and in its metadata what the scorer needs. Texts of
JSON are used there, because entries of different shapes may not be mixed in one dataset.
"""

import dataclasses
import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import sys
import types
import typing
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

PACKAGE = "reasoning-gym"
WITHOUT_WHEEL = ("cellpylib", "pycosat", "zss")
"""Packages that the package imports and that have no wheel, so that the sandbox cannot install them. A
few tasks use them."""

COMPOSITE = "composite"
"""The task that mixes other tasks, which its parameters hold as objects."""

HELD_OUT_SHARE = 4
"""One question in so many is held out."""

WRONG = "?"
"""An answer whose score is compared too."""

TRIES_PER_ROW, LEAST_TRIES = 16, 2_000
ROWS, REFUSED = Path("rows.jsonl"), Path("refused.txt")


class Unfit(Exception):
    """The request cannot be fulfilled. The text says why and what to do."""


class _Missing(types.ModuleType):
    """Takes the place of a package that has no wheel."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ModuleNotFoundError(
            f"this task needs the package {self.__name__}, which has no wheel; choose another task"
        )


def load_package() -> Any:
    """Import `reasoning_gym.factory`. Raises ImportError with what to do when the package is missing."""
    for name in WITHOUT_WHEEL:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = _Missing(name)
    try:
        importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise ImportError(
            f'{PACKAGE} cannot be imported ({error}); add "{PACKAGE}" to the dependencies in the '
            "pyproject.toml of this rollout, as docs/datasets.md shows"
        ) from error
    return importlib.import_module("reasoning_gym.factory")


def is_held_out(question: str) -> bool:
    """Whether a question belongs to the held-out rows. That depends on its words only, so the two
    splits never share a question, whatever their seeds, sizes and parameters are."""
    words = " ".join(question.split())
    return int.from_bytes(hashlib.sha256(words.encode()).digest()) % HELD_OUT_SHARE == 0


def make_rows(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `size` rows with different questions of a split. Raises Unfit."""
    size, is_wanted = request["size"], request["split"] == "held_out"
    tries = max(TRIES_PER_ROW * size, LEAST_TRIES)
    dataset = _generator(request["task"], request["parameters"], size=tries, seed=request["seed"])
    scorer = _scorer(request["task"], json.dumps(request["parameters"]))
    seen: set[str] = set()
    for number in range(tries):
        entry = _entry(dataset, number)
        question = entry["question"]
        words = " ".join(question.split())
        if words in seen or not words or is_held_out(question) != is_wanted:
            continue
        seen.add(words)
        yield _row(request, entry, dataset, scorer)
        if len(seen) == size:
            return
    raise Unfit(
        f"{request['task']} has {len(seen)} different questions of the split {request['split']} among "
        f"{tries} generated ones, and size is {size}; set size={len(seen)} or less, or parameters with "
        "more questions"
    )


def _entry(dataset: Any, number: int) -> dict[str, Any]:
    try:
        entry: dict[str, Any] = dataset[number]
    except ImportError as error:
        raise Unfit(str(error)) from error
    except Exception as error:  # generators of others raise anything
        raise Unfit(
            f"the generator failed at its question {number}: {type(error).__name__}: {error}; choose "
            "other parameters or another seed"
        ) from error
    return entry


def _row(
    request: dict[str, Any], entry: dict[str, Any], dataset: Any, scorer: Any
) -> dict[str, Any]:
    """The row of an entry. Raises Unfit for one that the scorer reads differently after JSON."""
    answer = entry["answer"]
    try:
        text = json.dumps(entry, sort_keys=True, allow_nan=False, default=str)
        stored, own = json.loads(text), dataset.score_answer
        is_same = scorer(answer, stored) == own(answer, entry)
        is_same &= _score(scorer, WRONG, stored) == _score(own, WRONG, entry)
    except Exception as error:  # and so do their scorers
        raise Unfit(
            f"an entry of {request['task']} cannot be stored and scored: {type(error).__name__}: "
            f"{error}; choose another task"
        ) from error
    if not is_same:
        raise Unfit(
            f"the scorer of {request['task']} gives another score when an entry was stored as JSON; "
            "choose another task"
        )
    metadata = {
        "reasoning_gym": request["task"],
        "package": request["package"],
        "parameters": json.dumps(request["parameters"], sort_keys=True),
        "entry": text,
    }
    row = {"user_prompt": entry["question"], "metadata": metadata}
    return row | ({"ground_truth": answer} if isinstance(answer, str) and answer else {})


def _generator(task: str, parameters: dict[str, Any], *, size: int, seed: int) -> Any:
    """The generator of a task. Raises Unfit when the task or a parameter is unknown or wrong."""
    if task == COMPOSITE:
        raise Unfit(f"{task} is made of other tasks, which a name cannot say; choose one of those")
    known = load_package().DATASETS
    if task not in known:
        raise Unfit(f"{PACKAGE} has no task {task!r}{_close(task, known)}")
    kind, config_type = known[task]
    settings = _check_parameters(task, config_type, parameters)
    fields = {field.name for field in dataclasses.fields(config_type)}
    own = {name: value for name, value in (("size", size), ("seed", seed)) if name in fields}
    try:
        config = config_type(**settings, **own)
        return kind(config=config)
    except Exception as error:  # configs refuse by assertions, mostly
        why = str(error) or type(error).__name__
        raise Unfit(f"{task} refuses its parameters: {why}; correct them") from error


def _check_parameters(task: str, config_type: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters as the task's config takes them: lists become tuples where it has tuples."""
    hints = typing.get_type_hints(config_type)
    known = [f.name for f in dataclasses.fields(config_type) if f.name not in ("size", "seed")]
    found = {}
    for name, value in parameters.items():
        if name not in known:
            raise Unfit(f"{task} has no parameter {name!r}{_close(name, known)}")
        found[name] = _fitting(f"{task}: {name}", value, hints[name])
    return found


WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _fitting(what: str, value: Any, hint: Any) -> Any:
    """A value in a type of a dataclass. Types that are neither simple nor a list are left to it."""
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [one for one in arguments if one is not type(None)]
        if value is None and len(kinds) < len(arguments):
            return None
        return _fitting(what, value, kinds[0]) if len(kinds) == 1 else value
    if origin in (list, tuple, set, frozenset):
        if not isinstance(value, list):
            raise Unfit(f'{what} must be a list, got {_show(value)}; write it like ["a","b"]')
        return value if origin is list else origin(value)
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin in WORDS and type(value) is not origin:
        raise Unfit(f"{what} must be {WORDS[origin]}, got {_show(value)}")
    return value


def _show(value: Any) -> str:
    return json.dumps(value)[:80]


def _close(name: str, known: Any) -> str:
    """The end of an error about an unknown name."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; it has: {', '.join(sorted(known))}" if known else "; it has none"


@lru_cache(maxsize=64)
def _scorer(task: str, parameters: str) -> Any:
    """The scorer of a task, with the parameters with which its rows were generated."""
    return _generator(task, json.loads(parameters), size=1, seed=0).score_answer


def score(answer: str, metadata: dict[str, Any]) -> float:
    """The score of an answer by the package's own scorer. Raises ValueError for a row that was not made
    from the package, or with another version of it."""
    missing = [k for k in ("reasoning_gym", "package", "parameters", "entry") if k not in metadata]
    if missing:
        raise ValueError(
            f"the metadata of this row has no {missing[0]!r}; use a dataset whose name in the TOML "
            f"begins with {PACKAGE}:"
        )
    scorer = _scorer(metadata["reasoning_gym"], metadata["parameters"])
    version = importlib.metadata.version(PACKAGE)
    if metadata["package"] != f"{PACKAGE}=={version}":
        raise ValueError(
            f"this row was generated with {metadata['package']}, and the rollout has {version}; name "
            f'"{metadata["package"]}" in its pyproject.toml'
        )
    return _score(scorer, answer, json.loads(metadata["entry"]))


def _score(scorer: Any, answer: str, entry: dict[str, Any]) -> float:
    """The score of an answer; 0.0 if the scorer cannot read it, because the policy chose it."""
    try:
        return float(scorer(answer, entry))
    except ImportError:
        raise
    except Exception:  # what a scorer raises depends on the answer
        return 0.0


def main() -> int:
    try:
        request = json.loads(sys.argv[1])
        rows = list(make_rows(request))
    except (Unfit, ImportError) as error:
        REFUSED.write_text(str(error))
        return 1
    if not all("ground_truth" in row for row in rows):
        rows = [{k: v for k, v in row.items() if k != "ground_truth"} for row in rows]
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
