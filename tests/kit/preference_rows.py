"""Rows of preferences for runs of tests: the shorter of two answers is the better one."""

import json


def _answers(number: int) -> tuple[str, str]:
    return str(number), f"I think that it may be {number}"


def pairs(numbers: range) -> str:
    """JSON Lines with a chosen and a rejected answer for each number."""
    rows = []
    for number in numbers:
        short, long = _answers(number)
        rows.append({"prompt": f"Say {number}", "chosen": short, "rejected": long})
    return "".join(json.dumps(row) + "\n" for row in rows)


def pairs_with_margins(numbers: range) -> str:
    """The same pairs, of which every second has a margin."""
    rows = [json.loads(line) for line in pairs(numbers).splitlines()]
    for number, row in enumerate(rows):
        row["margin"] = number % 2 / 2
    return "".join(json.dumps(row) + "\n" for row in rows)


def singles(numbers: range) -> str:
    """JSON Lines with one answer for each number, by turns the short and the long one."""
    rows = []
    for number in numbers:
        is_short = number % 2 == 0
        completion = _answers(number)[0 if is_short else 1]
        rows.append({"prompt": f"Say {number}", "completion": completion, "label": is_short})
    return "".join(json.dumps(row) + "\n" for row in rows)
