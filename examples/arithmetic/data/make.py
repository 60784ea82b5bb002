"""Makes the data of the arithmetic example: sums of two-digit numbers whose units carry.

A question is `What is 47 + 38?`. An answer shows its working: `15+70=85` means units plus tens is the
sum. Only a third of the demonstrations are careful; the others forget the carry (`15+70=75`), because
real demonstrations have flaws too. So a model that imitates them well is right about one time in
three, and it has the careful habit, which reinforcement learning can select.

    python data/make.py [--seed N] [--out DIR]

writes three files of JSON Lines:
    arithmetic-sft.jsonl      demonstrations        ground_truth = a student's working, right or wrong
    arithmetic-rl.jsonl       training questions    ground_truth = the true sum
    arithmetic-heldout.jsonl  held-out questions    ground_truth = the true sum
Held-out questions share no *unordered* pair with the other two files, because a model that has seen
47 + 38 knows 38 + 47 too.
"""

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

NUM_DEMONSTRATIONS = 17_920
NUM_QUESTIONS = 1_600
NUM_HELD_OUT = 200
CAREFUL = 0.33

Pair = tuple[int, int]


def carrying_pairs() -> list[Pair]:
    """All unordered pairs of two-digit numbers whose units carry, smaller number first."""
    return [(a, b) for a in range(10, 100) for b in range(a, 100) if a % 10 + b % 10 >= 10]


def split(pairs: Sequence[Pair], draw: random.Random) -> tuple[list[Pair], list[Pair]]:
    """Split unordered pairs into training and held-out pairs."""
    shuffled = list(pairs)
    draw.shuffle(shuffled)
    return shuffled[NUM_HELD_OUT:], shuffled[:NUM_HELD_OUT]


def either_order(pair: Pair, draw: random.Random) -> Pair:
    return pair if draw.random() < 0.5 else (pair[1], pair[0])


def question(pair: Pair) -> str:
    return f"What is {pair[0]} + {pair[1]}?"


def working(pair: Pair, *, careful: bool) -> str:
    """The answer with its working. A careless student forgets the carry of the units."""
    units = pair[0] % 10 + pair[1] % 10
    tens = sum(pair) - units
    answer = tens + units if careful else tens + units % 10
    return f"{units}+{tens}={answer}"


def demonstrations(pairs: Sequence[Pair], draw: random.Random) -> list[dict[str, str]]:
    """Demonstrations for random training pairs, of which exactly the share CAREFUL is right."""
    num_careful = round(NUM_DEMONSTRATIONS * CAREFUL)
    rows = []
    for number in range(NUM_DEMONSTRATIONS):
        pair = either_order(draw.choice(pairs), draw)
        answer = working(pair, careful=number < num_careful)
        rows.append({"user_prompt": question(pair), "ground_truth": answer})
    draw.shuffle(rows)
    return rows


def questions(pairs: Iterable[Pair]) -> list[dict[str, str]]:
    return [{"user_prompt": question(p), "ground_truth": str(sum(p))} for p in pairs]


def make(seed: int) -> dict[str, list[dict[str, str]]]:
    """The rows of each file, by file name. They depend on the seed only."""
    draw = random.Random(seed)
    training, held_out = split(carrying_pairs(), draw)
    ordered = sorted({p for a, b in training for p in ((a, b), (b, a))})
    return {
        "arithmetic-sft.jsonl": demonstrations(training, draw),
        "arithmetic-rl.jsonl": questions(draw.sample(ordered, NUM_QUESTIONS)),
        "arithmetic-heldout.jsonl": questions(either_order(pair, draw) for pair in held_out),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the data of the arithmetic example.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, rows in make(arguments.seed).items():
        path = arguments.out / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
