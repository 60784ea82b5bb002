"""The ledger of a run: checks in the log that nothing was lost and nothing was done twice."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def check(events: Iterable[Mapping[str, Any]], *, steps: int, groups: int, samples: int) -> None:
    """Assert that a finished run of `steps` steps, each of `groups` groups of `samples` samples,
    lost nothing and did nothing twice."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        kinds.setdefault(event["type"], []).append(event["data"])
    _once(kinds, "rl.batch.assembled", lambda data: data["step"], range(1, steps + 1))
    _once(kinds, "rl.policy.updated", lambda data: data["step"], range(1, steps + 1))
    _once(kinds, "rl.step.settled", lambda data: data["step"], range(steps + 1))
    wanted = {f"train-{step}-{slot}-0" for step in range(1, steps + 1) for slot in range(groups)}
    for kind in ("rl.group.generated", "rl.group.graded"):
        trained = [d for d in kinds.get(kind, ()) if "-train-" in d["spec"]["group"]]
        _once({kind: trained}, kind, lambda d: d["spec"]["group"].split("-", 1)[1], wanted)
        for data in trained:
            assert len(data["entries"]) == samples, data["spec"]["group"]
    singles = Counter(
        (d["spec"]["group"], d["entry"]["index"]) for d in kinds.get("rl.sample.generated", ())
    )
    assert not [key for key, count in singles.items() if count > 1], "a sample was recorded twice"
    assert len(kinds.get("rl.run.finished", ())) == 1


def check_costs(events: Iterable[Mapping[str, Any]], line: Mapping[str, Any]) -> None:
    """Assert that a line of the cost ledger is the sum over the events of its run, each effect once."""
    took, wasted, seen = Counter[str](), Counter[str](), Counter[object]()
    for event in events:
        if work := event["data"].get("work"):
            lost = work.get("wasted_s", 0.0)
            took[work["effect"]] += work["device_s"] + lost
            wasted[work["effect"]] += lost
            seen[_effect_of(work["effect"], event["data"])] += 1
    assert not [key for key, count in seen.items() if count > 1], "an effect counts twice"
    assert line["effects"] == pytest.approx(dict(took), abs=0.002)
    assert line["wasted"] == pytest.approx({k: s for k, s in wasted.items() if s}, abs=0.002)


def _effect_of(effect: str, data: Mapping[str, Any]) -> object:
    """What tells effects of one type apart: the sample, the group, or the step."""
    spec = data.get("spec") or {}
    return effect, spec.get("group"), (data.get("entry") or {}).get("index"), _step_of(data)


def _step_of(data: Mapping[str, Any]) -> object:
    return data.get("step", (data.get("spec") or {}).get("step"))


def _once(
    kinds: Mapping[str, list[Mapping[str, Any]]], kind: str, key: Any, wanted: Iterable[object]
) -> None:
    counts = Counter(key(data) for data in kinds.get(kind, ()))
    assert set(counts) == set(wanted), f"{kind}: {set(wanted) ^ set(counts)}"
    assert max(counts.values()) == 1, f"{kind} twice: {counts.most_common(3)}"
