"""How far our losses and gradients are from those of each oracle: the table of
`docs/algorithms.md`.

python -m tests.oracles.measure [EXAMPLES]
"""

import sys

from hypothesis import HealthCheck, given, settings

from tests.oracles.cases import Case, cases
from tests.oracles.comparisons import COMPARISONS
from tests.oracles.pairs import PREFERENCE_COMPARISONS, PairCase, gap, pair_cases
from tests.oracles.teachers import (
    DISTILLED_WITH,
    ON_A_SERVER,
    PEERS,
    TeacherCase,
    teacher_cases,
    teacher_gap,
)


def worst(name: str, examples: int) -> dict[str, tuple[float, float]]:
    """Oracle -> the largest difference of value and of gradient, over 1 + the size of each."""
    found: dict[str, tuple[float, float]] = {}

    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def draw(case: Case) -> None:
        mine, theirs = (COMPARISONS | ON_A_SERVER)[name](case)
        for oracle, answer in theirs.items():
            value = abs(mine.loss - answer.loss) / (1 + abs(answer.loss))
            gap = (mine.gradient - answer.gradient).abs() / (1 + answer.gradient.abs())
            before = found.get(oracle, (0.0, 0.0))
            found[oracle] = (max(before[0], value), max(before[1], float(gap.max())))

    draw()
    return found


def worst_of_pairs(name: str, examples: int) -> dict[str, float]:
    """Oracle -> the largest difference of value or gradient of a preference loss."""
    found: dict[str, float] = {}

    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(pair_cases())
    def draw(case: PairCase) -> None:
        mine, theirs = PREFERENCE_COMPARISONS[name](case)
        for oracle, solution in theirs.items():
            found[oracle] = max(found.get(oracle, 0.0), gap(mine, solution))

    draw()
    return found


def worst_of_teachers(name: str, examples: int) -> dict[str, float]:
    """Oracle -> the largest difference of value or gradient of a divergence from a teacher."""
    found = dict.fromkeys(PEERS, 0.0)

    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(teacher_cases(betas=DISTILLED_WITH[name]))
    def draw(case: TeacherCase) -> None:
        for oracle in PEERS:
            found[oracle] = max(found[oracle], teacher_gap(case, oracle))

    draw()
    return found


def main() -> None:
    examples = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    print(f"| | {' | '.join(ORACLES)} |\n|{'---|' * (len(ORACLES) + 1)}")
    for name in (*COMPARISONS, *ON_A_SERVER):
        found = worst(name, examples)
        cells = [f"{max(found[o]):.0e}" if o in found else "-" for o in ORACLES]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    for name in PREFERENCE_COMPARISONS:
        gaps = worst_of_pairs(name, examples)
        cells = [f"{gaps[o]:.0e}" if o in gaps else "-" for o in ORACLES]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    for name in DISTILLED_WITH:
        gaps = worst_of_teachers(name, examples)
        cells = [f"{gaps[o]:.0e}" if o in gaps else "-" for o in ORACLES]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


ORACLES = ("TRL", "Liger", "verl")

if __name__ == "__main__":
    main()
