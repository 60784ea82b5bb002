"""The teacher of a run: a frozen policy that reads the samples of the student.

It reads exactly the tokens that the student sampled, so both must have the same vocabulary. The bits of
a step follow from its content too. So its hash is part of every version, and a step from a version is
refused if the teacher has changed since.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from schemas.errors import CorruptData, Refused
from schemas.models.teacher import TeacherRef
from trainer.forward.packing import MicroBatch
from trainer.forward.predictions import Predictions
from trainer.model.base import Base
from trainer.model.lora_names import Scaling, Tensors
from trainer.policy import LoadedModel, Policy

HASH = "teacher.sha256"
"""The name of the teacher's hash in the state of a version: 32 bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Teacher:
    """A policy that is not trained. `name` is how the run's config names it."""

    name: str
    policy: Policy

    @property
    def num_tokens(self) -> int:
        """How many tokens its model tells apart, with the padding behind its vocabulary."""
        return int(self.policy.loaded.base.model.config.get_text_config().vocab_size)

    def check_length(self, num_tokens: int) -> None:
        """Raises Refused for a row of this many tokens that has more than the model has positions."""
        context = self.policy.loaded.base.context
        if num_tokens > context:
            raise Refused(
                f"advanced.teacher {self.name!r} has {context} positions, and reads a sample of "
                f"{num_tokens} tokens; lower training.max_response_length, or shorten "
                "advanced.teacher_hint"
            )

    @torch.no_grad()
    def predictions(self, micro: MicroBatch) -> Predictions:
        """The teacher's predictions in the place of each action."""
        return self.policy.predictions(micro)


@dataclass(frozen=True, slots=True, eq=False)
class TeacherModel:
    """The model that `ref` names, on the device, with the tensors of its adapter if it has one."""

    ref: TeacherRef
    loaded: LoadedModel
    tensors: Tensors

    @property
    def sha256(self) -> str:
        """The hash of the teacher. A directory and a hub id may get other weights, so theirs are hashed.
        Everything else is named by its content."""
        parts = [self.ref.model_dump_json(exclude={"name"})]
        if self.ref.model.kind in ("directory", "hub"):
            parts.append(self.loaded.base.weights_sha256)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def beside(self, student: Policy) -> Teacher:
        """The teacher as a policy whose passes are computed like those of `student`."""
        scaling = Scaling(self.ref.lora_alpha, self.ref.lora_scaling)
        forward = replace(student.forward, recompute=False)
        return Teacher(
            self.ref.name, Policy(self.loaded, dict(self.tensors), scaling, None, forward)
        )

    def check_unchanged(self, recorded: str) -> None:
        """Raises Refused unless the teacher is the one with which the run began."""
        if self.sha256 != recorded:
            raise Refused(
                f"advanced.teacher {self.ref.name!r} was changed since the run began: its hash is "
                f"{self.sha256[:16]} and was {recorded[:16]}; put it back, or submit a new run"
            )

    def check_vocabulary(self, student: Base) -> None:
        """Raises Refused unless the teacher has the student's tokens under the same ids."""
        theirs, ours = self.loaded.base.tokenizer.get_vocab(), student.tokenizer.get_vocab()
        differing = sorted(t for t in {*theirs, *ours} if theirs.get(t) != ours.get(t))
        if not differing:
            return
        token = differing[0]
        raise Refused(
            f"advanced.teacher {self.ref.name!r} has another vocabulary than the model of the run: "
            f"{len(differing)} tokens differ, such as {token!r} ({_place(theirs.get(token))} for the "
            f"teacher, {_place(ours.get(token))} for the run). Name a teacher with the same tokenizer, "
            "or train on its answers with algorithm = 'sft'"
        )


def _place(token_id: int | None) -> str:
    return "missing" if token_id is None else f"id {token_id}"


def write_hash(sha256: str) -> dict[str, torch.Tensor]:
    """A teacher's hash as part of a version's state. Empty for a run without a teacher's model."""
    if not sha256:
        return {}
    return {HASH: torch.tensor(list(bytes.fromhex(sha256)), dtype=torch.uint8)}


def read_hash(state: Mapping[str, torch.Tensor]) -> tuple[str, dict[str, torch.Tensor]]:
    """The teacher's hash in a version's state ("" if it has none), and the rest of the state. Raises
    CorruptData when it is not a hash."""
    rest = {name: tensor for name, tensor in state.items() if name != HASH}
    if HASH not in state:
        return "", rest
    if state[HASH].dtype != torch.uint8 or tuple(state[HASH].shape) != (32,):
        raise CorruptData("the hash of the teacher in this version's state is not one of 32 bytes")
    return bytes(state[HASH].tolist()).hex(), rest
