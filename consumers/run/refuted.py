"""Has groups with refuted samples generated again. Their draws are the same, so the run ends with the
bits of one whose servers never erred. Pure functions."""

from consumers.run.state import RunEvent, RunState
from schemas.events import GroupsRequested, RunPaused, RunWarned, SampleRefuted
from schemas.ids import REFUTED, GroupKey, Purpose, parse_sample_id
from schemas.models.sampling_server import BUILT_IN
from schemas.specs import Slot

FENCED_AFTER = 3
"""After so many batches with refuted samples a server is fenced: the run samples there only if no other
server is up, until it is paused and resumed."""
MOST_IN_A_ROW = 5
"""After so many refutations of the same slot the run pauses."""


def request_again(state: RunState, message: SampleRefuted) -> tuple[RunEvent, ...]:
    """Request the refuted groups of the batch that the learner has, and warn about their servers. Later
    events about the same batch change nothing."""
    step = state.assembled
    if state.training != message.step or step is None or step.template is None:
        return ()
    key = GroupKey.parse(parse_sample_id(message.sample)[0])
    if step.numbers.get(key.slot, 0) != key.replacement:
        return ()
    slots = tuple(
        Slot(
            slot=slot,
            replacement=step.numbers.get(slot, 0) + REFUTED,
            row=step.row_of(slot),
        )
        for slot in message.slots
    )
    warned = _warn(state, message)
    template = step.template.model_copy(
        update={"avoid": tuple(sorted({*fenced_servers(state), *message.servers} - {BUILT_IN}))}
    )
    request = GroupsRequested(
        owner=message.run,
        purpose=Purpose.TRAIN,
        step=message.step,
        slots=slots,
        template=template,
    )
    if all(slot.replacement // REFUTED % MOST_IN_A_ROW for slot in slots):
        return (*warned, request)
    return (*warned, request, _pause(state, message))


def fenced_servers(state: RunState) -> tuple[str, ...]:
    """Return the servers that the run does not sample on while there is another."""
    return tuple(sorted(url for url, times in state.refuted.items() if times >= FENCED_AFTER))


def _warn(state: RunState, message: SampleRefuted) -> tuple[RunWarned, ...]:
    found = []
    for server in message.servers:
        times = state.refuted.get(server, 0) + 1
        if times > FENCED_AFTER:
            continue
        text = (
            f"samples of the sampler {server} in step {message.step} do not come from version "
            f"{message.policy_version} of the policy; they are not trained, and their groups are "
            "generated again"
        )
        if times == FENCED_AFTER:
            text += (
                f". This is the third batch, so {server} is fenced: the run samples there only if no "
                "other server is up. Restart the server, then pause and resume the run"
            )
        found.append(
            RunWarned(
                run=message.run,
                step=message.step,
                message=text,
                about="refuted",
                category=server,
            )
        )
    return tuple(found)


def _pause(state: RunState, message: SampleRefuted) -> RunPaused:
    servers = ", ".join(message.servers)
    reason = (
        f"the samples of a group of step {message.step} were refuted {MOST_IN_A_ROW} times in a row; "
        f"the last ones came from {servers}. Check which weights and which chat template these samplers "
        "serve, restart them, then resume the run; or submit it again with advanced.attest = false"
    )
    return RunPaused(run=message.run, step=max(0, state.settled), reason=reason)
