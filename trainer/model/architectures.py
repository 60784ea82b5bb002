"""Which architectures can be trained, and how others are refused.

Any model that Transformers can build as a causal language model is accepted. The tests train and sample
those of `schemas.models.families.TESTED`, each in a tiny shape. Others are accepted after a probe: a
later token must not change an earlier prediction (an encoder behind a language head would train to
nonsense), and the model must have a cache from which reading can continue.
"""

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import __version__ as version

from schemas.errors import Refused
from schemas.models.families import TESTED

TOLERANCE = 1e-5
"""The largest difference between logits that counts as equal, as a part of the largest logit. The probe
runs in fp32."""


def check_known(config: PreTrainedConfig, *, what: str) -> None:
    """Raises Refused unless Transformers builds a causal language model from this config."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    raise Refused(
        f"{what} has the architecture {config.model_type!r}, which is not a causal language model in "
        f"Transformers {version}. {advice()}"
    )


@torch.no_grad()
def check_causal(model: PreTrainedModel, *, what: str) -> None:
    """Raises Refused when a later token changes an earlier prediction, or when the model has no
    key-value cache."""
    device = model.device
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)  # noqa: S101 - mypy: a module's attribute may be a module
    first_T = torch.arange(4, device=device) % len(embedding)
    other_T = first_T.clone()
    other_T[-1] = first_T[0]
    answer = model(torch.stack([first_T, other_T]), use_cache=True)
    before_T_V, same_T_V = answer.logits[:, :-1].float()
    if (before_T_V - same_T_V).abs().max() > TOLERANCE * before_T_V.abs().max():
        raise Refused(
            f"{what} ({model.config.model_type!r}) is not causal: a later token changes what it "
            f"predicts before it. {advice()}"
        )
    if getattr(answer, "past_key_values", None) is None:
        raise Refused(
            f"{what} ({model.config.model_type!r}) has no key-value cache, so it cannot be sampled "
            f"from. {advice()}"
        )


def advice() -> str:
    """The part of an error message that says which models to use instead."""
    names = ", ".join(family.name for family in TESTED)
    return f"Name a model of a family that is tested: {names}"
