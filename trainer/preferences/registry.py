"""The registry of preference objectives, and the settings that a run gives them."""

from dataclasses import replace

from schemas.config import Advanced, Algorithm
from trainer.preferences import dpo, kto, online_dpo, orpo, reward_model, simpo
from trainer.preferences.objective import PreferenceObjective, PreferenceSettings

PREFERENCE_OBJECTIVES: dict[Algorithm, PreferenceObjective] = {
    "dpo": dpo.OBJECTIVE,
    "kto": kto.OBJECTIVE,
    "orpo": orpo.OBJECTIVE,
    "simpo": simpo.OBJECTIVE,
    "online_dpo": online_dpo.OBJECTIVE,
    "reward_model": reward_model.OBJECTIVE,
}

SAME_NAME = (
    "beta",
    "label_smoothing",
    "simpo_gamma",
    "desirable_weight",
    "undesirable_weight",
    "center_rewards_coefficient",
)
"""Keys of `[advanced]` that are fields of PreferenceSettings under the same name."""


def settings_of(advanced: Advanced) -> PreferenceSettings:
    """The settings of a run: the values that it sets, and its objective's defaults for the others."""
    configured = {key: value for key in SAME_NAME if (value := getattr(advanced, key)) is not None}
    if advanced.preference_loss is not None:
        configured["loss"] = advanced.preference_loss
    return replace(PREFERENCE_OBJECTIVES[advanced.algorithm].defaults, **configured)
