"""Refuses a model whose files would make Transformers load something else, or build without end.

Two files are checked before any weight is read. A config that names a kernel on the hub would make
Transformers download and run its code. One that claims a billion layers would make it build them before
it looks at the weights. An adapter's config would make it load the base model named there.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from transformers import PreTrainedConfig
from transformers.utils.peft_utils import find_adapter_config_file

from schemas.errors import Refused

ADAPTER = "adapter_config.json"
LAYERS = frozenset({"num_hidden_layers", "num_layers", "n_layer", "n_layers"})
MOST_LAYERS = 4096
"""No published model has as many."""


def check_files(name: str, *, what: str) -> None:
    """Raises Refused for a model (a directory or a hub id) whose files name code or weights elsewhere,
    OSError when they cannot be read."""
    is_here = (Path(name) / ADAPTER).exists()
    if is_here or (not Path(name).is_dir() and find_adapter_config_file(name) is not None):
        raise Refused(
            f"{what} holds an {ADAPTER}, so it is an adapter and would be loaded with the base model "
            "that this file names. Name the base model, or merge the adapter and remove the file"
        )
    config, _ = PreTrainedConfig.get_config_dict(name)
    for key, value in _implementations(config):
        raise Refused(
            f"the config.json of {what} holds {key} = {value[:100]!r}, which is code on the hub: "
            f"remove {key} from it"
        )
    for key, number in _numbers_of_layers(config):
        if not 1 <= number <= MOST_LAYERS:
            raise Refused(
                f"the config.json of {what} holds {key} = {str(number)[:40]}; a model may have 1 to "
                f"{MOST_LAYERS} layers, so name another one"
            )


def _numbers_of_layers(config: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """How many layers the model and each of its parts claim."""
    for key, value in config.items():
        if key in LAYERS and isinstance(value, int | float):
            yield key, value
        elif isinstance(value, Mapping):
            yield from _numbers_of_layers(value)


def _implementations(config: object, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Keys that choose an implementation, with values that name code elsewhere
    (`organisation/kernel`)."""
    if not isinstance(config, Mapping) or depth > 8:
        return
    for key, value in config.items():
        if "implementation" in str(key):
            for named in value.values() if isinstance(value, Mapping) else (value,):
                if isinstance(named, str) and ("/" in named or ":" in named):
                    yield str(key), named
        else:
            yield from _implementations(value, depth + 1)
