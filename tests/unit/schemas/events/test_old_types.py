"""Events that have another type today are read under the type of earlier releases, too."""

import json

from schemas.envelope import current_type, decode_event, stored_types
from schemas.events import CommitRequested
from schemas.specs import CommitSpec

OLD, NEW = "rl.workspace.pushed", "rl.workspace.commit-requested"
EVENT = CommitRequested(workspace="w", workspace_name="sums", commit=CommitSpec(url="/srv/sums"))


def test_a_payload_of_the_old_type_is_todays_event() -> None:
    assert decode_event(OLD, 1, EVENT.model_dump_json()) == EVENT
    assert decode_event(NEW, 1, EVENT.model_dump_json()) == EVENT
    recorded = {"workspace": "w", "workspace_name": "sums", "commit": {"url": "/srv/sums"}}
    assert decode_event(OLD, 1, json.dumps(recorded)) == EVENT


def test_types_are_found_under_all_their_names() -> None:
    assert (current_type(OLD), current_type(NEW), current_type("x.y")) == (NEW, NEW, "x.y")
    assert stored_types([NEW, "rl.run.started"]) == [NEW, "rl.run.started", OLD]
    assert stored_types([OLD]) == [NEW, OLD]
    assert stored_types(["x.y"]) == ["x.y"]


def test_a_repeated_request_still_has_the_same_ids() -> None:
    """Ids of events follow from their names."""
    assert EVENT.name == OLD
