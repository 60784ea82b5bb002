"""The measured work of effects, as their events record it."""

from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict, Field

CPU = "cpu"
"""The kind of the device on which everything runs that needs no accelerator."""

GPU = "gpu."
"""How the kinds of GPUs begin: `gpu.H100`."""

Spent = dict[str, float]
"""Device-seconds by kind of device, those of lost attempts included."""


class Work(BaseModel):
    """The measured work of an effect. `effect` is its type, and `device` the kind of device: `cpu`, or
    `gpu.` and a name. `device_s` are the seconds of the device in the attempt that ended it: effects
    that run at the same time share each second. `wasted_s` are those of its earlier attempts, which
    were repeated or whose worker died."""

    model_config = ConfigDict(frozen=True)
    effect: str
    device: str
    device_s: float = Field(ge=0)
    wasted_s: float = Field(default=0.0, ge=0, exclude_if=lambda value: value == 0)


def spent_by(works: Iterable[Work | None]) -> Spent:
    """Return the device-seconds of all these, by kind of device."""
    return add_spent({work.device: work.device_s + work.wasted_s} for work in works if work)


def add_spent(parts: Iterable[Mapping[str, float]]) -> Spent:
    """Return the sums by kind of device."""
    total: Spent = {}
    for part in parts:
        for device, seconds in part.items():
            total[device] = total.get(device, 0.0) + seconds
    return total


def gpu_kind(name: str) -> str:
    """Return the kind of a GPU from the name that its driver gives: `gpu.H100` for `NVIDIA H100 80GB
    HBM3`."""
    words = [word for word in name.split() if word.lower() not in ("nvidia", "tesla", "geforce")]
    if not words:
        return GPU + "unknown"
    short = words[0].split("-")[0]
    return GPU + (f"{short}-{words[1]}" if short in ("RTX", "GTX") and len(words) > 1 else short)
