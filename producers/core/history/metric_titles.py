"""The titles of metrics, as charts and tables show them."""

VALIDATION = "eval/validation/reward"

LOSSES = {"train/loss": "Training Loss", "eval/validation/loss": "Validation Loss"}
"""The metrics that are drawn large where the answers of a dataset are learned, and listed elsewhere."""

TITLES = {
    "rollout/raw_reward": "Training Reward",
    VALIDATION: "Validation Reward",
    "train/entropy_loss": "Model Entropy",
    "rollout/response_lengths": "Response Length",
    "rollout/total_lengths": "Total Length",
    "rollout/truncated_ratio": "Truncation Ratio",
    "train/kl": "KL Divergence",
    "train/grad_norm": "Gradient Norm",
    "train/lag": "Lag (versions)",
    "rollout/failed_ratio": "Failed Samples",
    "rollout/zero_variance_ratio": "Groups without Variance",
    "eval/validation/accuracy": "Validation Accuracy",
    "rewards/accuracies": "Preference Accuracy",
    "rewards/margins": "Preference Margin",
    "pool/normal": "Rows in no Pool",
    "pool/easy": "Rows in the Easy Pool",
    "pool/hard": "Rows in the Hard Pool",
}
"""The metrics that charts show first, in this order."""


def title_of(key: str) -> str:
    """The title of a metric. One without a title of its own gets its key in words."""
    found = TITLES.get(key) or LOSSES.get(key)
    return found or key.replace("/", " ").replace("_", " ").title()
