"""A package with the interface of `reasoning-gym`, for tests that need no index. Like the real one, it
draws the question `i` of the seed `s` from the seed `s + i`, and imports packages that have no wheel."""

FACTORY = '''
from dataclasses import dataclass
from random import Random

import pycosat


class Task:
    def __init__(self, config):
        if hasattr(config, "validate"):
            config.validate()
        self.config = config

    def score_answer(self, answer, entry):
        if answer == "crash":
            raise RuntimeError("no such answer")
        return float(answer == entry["answer"])


@dataclass
class SumsConfig:
    most: int = 9
    scale: float = 1.0
    signs: tuple[str, ...] = ("+",)
    word: str = "Add"
    note: str | None = None
    is_kind: bool = True
    seed: int | None = None
    size: int = 500

    def validate(self):
        assert self.most >= 1, "most must be at least 1"


class Sums(Task):
    def __getitem__(self, i):
        draw = Random(self.config.seed + i)
        a, b = draw.randint(0, self.config.most), draw.randint(0, self.config.most)
        question = f"{self.config.word} {a} and {b}."
        return {"question": question, "answer": str(a + b), "metadata": {"i": i}}


class Open(Sums):
    """No answer is the only right one."""

    def __getitem__(self, i):
        return super().__getitem__(i) | {"answer": None}


class Tuples(Sums):
    """Its scorer compares tuples, which JSON does not have."""

    def __getitem__(self, i):
        found = super().__getitem__(i)
        return found | {"metadata": {"digits": tuple(found["answer"])}}

    def score_answer(self, answer, entry):
        return float(tuple(answer) == entry["metadata"]["digits"])


class Sets(Sums):
    """Its scorer fails after JSON."""

    def __getitem__(self, i):
        return super().__getitem__(i) | {"metadata": {1, 2}}

    def score_answer(self, answer, entry):
        return float(entry["metadata"] <= {1, 2})


class Failing(Sums):
    def __getitem__(self, i):
        raise ZeroDivisionError("division by zero")


class Solved(Sums):
    def __getitem__(self, i):
        return pycosat.solve([])


class Endless(Sums):
    def __getitem__(self, i):
        while True:
            pass


KINDS = (Sums, Open, Tuples, Sets, Failing, Solved, Endless)
DATASETS = {kind.__name__.lower(): (kind, SumsConfig) for kind in KINDS}
'''

FILES = {
    "reasoning_gym/__init__.py": "from . import factory\n",
    "reasoning_gym/factory.py": FACTORY,
}
