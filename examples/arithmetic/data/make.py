"""Makes the data of the arithmetic example: sums of two-digit numbers whose units carry.

A question is `What is 47 + 38?`; an answer shows its working, `15+70=85`: units, plus tens, is the
sum. Of the demonstrations only a third is careful; the others forget the carry (`15+70=75`), as real
demonstrations are flawed. So a model that imitates them well is right about one time in three, and
the careful habit is there for reinforcement learning to select.

    python data/make.py [--seed N] [--out DIR]

writes three files of JSON Lines:
    sft.jsonl       demonstrations        ground_truth = the working a student wrote, right or wrong
    rl.jsonl        training questions    ground_truth = the true sum
    heldout.jsonl   held-out questions    ground_truth = the true sum
Held-out questions share no *unordered* pair with the other two: whoever saw 47 + 38 also saw 38 + 47.
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
    """Unordered pairs -> (training, held out)."""
    shuffled = list(pairs)
    draw.shuffle(shuffled)
    return shuffled[NUM_HELD_OUT:], shuffled[:NUM_HELD_OUT]


def either_order(pair: Pair, draw: random.Random) -> Pair:
    return pair if draw.random() < 0.5 else (pair[1], pair[0])


def question(pair: Pair) -> str:
    return f"What is {pair[0]} + {pair[1]}?"


def working(pair: Pair, *, careful: bool) -> str:
    """The answer with its working; a careless student forgets the carry of the units."""
    units = pair[0] % 10 + pair[1] % 10
    tens = sum(pair) - units
    answer = tens + units if careful else tens + units % 10
    return f"{units}+{tens}={answer}"


def demonstrations(pairs: Sequence[Pair], draw: random.Random) -> list[dict[str, str]]:
    """Demonstrations over random training pairs; exactly the share CAREFUL of them is right."""
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
    """File name -> rows; a function of the seed alone."""
    draw = random.Random(seed)
    training, held_out = split(carrying_pairs(), draw)
    ordered = sorted({p for a, b in training for p in ((a, b), (b, a))})
    return {
        "sft.jsonl": demonstrations(training, draw),
        "rl.jsonl": questions(draw.sample(ordered, NUM_QUESTIONS)),
        "heldout.jsonl": questions(either_order(pair, draw) for pair in held_out),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the data of the arithmetic example.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    for name, rows in make(asked.seed).items():
        path = asked.out / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
