"""A fault that an engine reports about itself reaches the run once."""

from consumers.rollout.sampling import alarm_once, entry_of, record_of
from schemas.events import GroupGraded, GroupsSettled, RunWarned
from schemas.sampling import Turn
from tests.kit.decider import When
from tests.kit.specs import entry
from tests.unit.consumers.run.test_health import Played
from tests.unit.consumers.runs import graded, only

ALARM = "http://a:1 is fenced: after loading x its logprobs differ"


def alarmed(story: Played, *alarms: str | None) -> list[When]:
    """The groups of the next step, whose first samples carry these alarms."""
    said = []
    for spec, alarm in zip(story.asked.pop(0).group_specs(), alarms, strict=False):
        done = graded(spec)
        assert isinstance(done, GroupGraded)
        first, *others = done.entries
        told = (first.model_copy(update={"alarm": alarm}), *others)
        said.append(story.tell(done.model_copy(update={"entries": told})))
    return said


def test_a_fenced_server_is_one_warning_however_many_groups_tell_of_it() -> None:
    first, second = alarmed(Played(steps=3), ALARM, ALARM)
    first.then_types(GroupsSettled, RunWarned)
    (warning,) = only(first, RunWarned)
    assert (warning.message, warning.about, warning.step) == (ALARM, "sampler", 1)
    assert not only(second, RunWarned)


def test_another_server_is_another_warning() -> None:
    first, second = alarmed(Played(steps=3), ALARM, ALARM + "; b too")
    assert only(first, RunWarned)
    assert [w.message for w in only(second, RunWarned)] == [ALARM + "; b too"]


def test_a_turn_s_alarm_is_in_its_sample_s_entry_and_once_in_a_group_s() -> None:
    turn = Turn(
        prompt_ids=(1,), completion_ids=(2,), logprobs=(-1.0,), text="x", finish_reason="stop"
    )
    record = record_of(0, (turn, turn.model_copy(update={"alarm": ALARM})), (), failure=None)
    assert entry_of(record).alarm == ALARM
    entries = alarm_once(entry(i, alarm=ALARM if i else None) for i in range(4))
    assert [e.alarm for e in entries] == [None, ALARM, None, None]
