"""Makes the model that a deployment serves from a checkpoint of a run."""

from schemas.algorithms import SCORED
from schemas.deployments import ServedModel, shown_base_name
from schemas.errors import InvalidConfig
from schemas.events import RunRequested
from schemas.sampling import PolicyRef
from schemas.specs import CheckpointSpec


def served_model(
    run: RunRequested, spec: CheckpointSpec, *, name: str, reward: float | None
) -> ServedModel:
    """The checkpoint of a run as it is served under a name. Raises InvalidConfig when it is not a LoRA
    adapter, or is that of a reward model."""
    if run.config.advanced.algorithm in SCORED:
        raise InvalidConfig(
            f"{run.run_name}@{spec.step} is a reward model, which scores answers and writes none; name "
            "it in advanced.reward_models of a run, and deploy a checkpoint of another algorithm"
        )
    if spec.tuning != "lora" or spec.state.weights is None:
        raise InvalidConfig(
            f"{run.run_name}@{spec.step} has all weights of a model (advanced.tuning = 'full'), and "
            "only LoRA adapters are deployed; deploy a checkpoint with advanced.tuning = 'lora'"
        )
    return ServedModel(
        name=name,
        base_name=shown_base_name(run.config.experiment.model_path),
        model=spec.model,
        policy=PolicyRef(version=spec.step, weights=spec.state.weights),
        lora_alpha=run.config.advanced.lora_alpha,
        lora_scaling=run.config.advanced.lora_scaling,
        run=run.run,
        run_name=run.run_name,
        step=spec.step,
        reward=reward,
        workspace=run.owner_workspace,
        date=run.today,
    )
