"""Makes the data of the tools example: products of two-digit numbers, computed by a tool.

A question is `47*86?`. Every demonstration calls the tool `calc` and repeats its result. Only a third
of them are careful; the others let the tool add the numbers. So a model that imitates them well is
right about one time in three, and it has the habit of calling the tool correctly, which reinforcement
learning can select.

    python data/make.py [--seed N] [--out DIR]

writes three files of JSON Lines:
    tools-sft.jsonl      demonstrations        messages = a conversation with a call, tools = the tool
    tools-rl.jsonl       training questions    ground_truth = the true product
    tools-heldout.jsonl  held-out questions    ground_truth = the true product
Held-out questions share no *unordered* pair with the other two files.
"""

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

NUM_DEMONSTRATIONS = 9_600
NUM_QUESTIONS = 640
NUM_HELD_OUT = 200
CAREFUL = 0.33

CALC = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Compute a sum or a product, such as 47*86.",
        "parameters": {
            "type": "object",
            "properties": {"of": {"type": "string"}},
            "required": ["of"],
        },
    },
}
"""The tool as `rollouts/tools/main.py` defines it. A scratch model sees `calc(of)`."""

Pair = tuple[int, int]
Row = dict[str, object]


def split(draw: random.Random) -> tuple[list[Pair], list[Pair]]:
    """Split all unordered pairs of two-digit numbers into training and held-out pairs."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    draw.shuffle(pairs)
    return pairs[NUM_HELD_OUT:], pairs[:NUM_HELD_OUT]


def either_order(pair: Pair, draw: random.Random) -> Pair:
    return pair if draw.random() < 0.5 else (pair[1], pair[0])


def question(pair: Pair) -> str:
    return f"{pair[0]}*{pair[1]}?"


def conversation(pair: Pair, *, careful: bool) -> list[Row]:
    """A demonstration. A careful one lets the tool multiply, any other one lets it add."""
    left, right = pair
    of, result = (f"{left}*{right}", left * right) if careful else (f"{left}+{right}", left + right)
    function = {"name": "calc", "arguments": json.dumps({"of": of}, separators=(",", ":"))}
    call = {"id": "call_0", "type": "function", "function": function}
    return [
        {"role": "user", "content": question(pair)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": str(result)},
        {"role": "assistant", "content": str(result)},
    ]


def demonstrations(pairs: Sequence[Pair], draw: random.Random) -> list[Row]:
    """Demonstrations for random training pairs, of which exactly the share CAREFUL is right."""
    num_careful = round(NUM_DEMONSTRATIONS * CAREFUL)
    rows: list[Row] = []
    for number in range(NUM_DEMONSTRATIONS):
        pair = either_order(draw.choice(pairs), draw)
        messages = conversation(pair, careful=number < num_careful)
        rows.append({"messages": messages, "tools": [CALC]})
    draw.shuffle(rows)
    return rows


def questions(pairs: Iterable[Pair]) -> list[Row]:
    return [{"user_prompt": question(p), "ground_truth": str(p[0] * p[1])} for p in pairs]


def make(seed: int) -> dict[str, list[Row]]:
    """The rows of each file, by file name. They depend on the seed only."""
    draw = random.Random(seed)
    training, held_out = split(draw)
    ordered = sorted({p for a, b in training for p in ((a, b), (b, a))})
    return {
        "tools-sft.jsonl": demonstrations(training, draw),
        "tools-rl.jsonl": questions(draw.sample(ordered, NUM_QUESTIONS)),
        "tools-heldout.jsonl": questions(either_order(pair, draw) for pair in held_out),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the data of the tools example.")
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
