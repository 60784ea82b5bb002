"""The C of small models. Skip this folder unless you work on CPU speed.

**What it is.** A narrow model (up to 512 hidden) spends more time on starting torch operations than on
computing them. So its forward and backward pass, and its decoding steps, are a few C functions here.
Those of a wider one with adapters (a base of up to 1 GiB) are in C too, because they pass less through
memory, and threads do not meet after each operation.
Everything that knows about C is in this folder: the sources, how they are compiled, the ctypes
structures, and how weights are packed for them. The rest of the trainer uses only what this module
exports, and an import contract in pyproject.toml checks that.

**When it is used.** On a CPU, for models that `supported_models.py` accepts, where a C compiler is found
(`cc`, or the one that `CC` names). Sources are compiled at first use and cached in `~/.cache/headrace`.
Everything computed here is also computed through torch (`trainer/forward/fused_pass.py` and
`trainer/sampler/decode_model.py`), and the tests compare the two. Read those to learn what is computed.

**How to turn it off.** `advanced.deterministic = true` turns it off for a run, because a run's bits must
not depend on whether a machine has a compiler. `advanced.recompute` turns it off for the learner.
`CC=false` turns it off for a process, which then logs one warning.

| export | used by | C source |
|---|---|---|
| `learner_pass` | `trainer/policy.py`: the learner's pass over one version | `learn.c` |
| `native_decoder` | `trainer/sampler/decode_model.py`: sampling from one version | `decode.c` |
| `PackedBases` | the sampler's batcher keeps one, so that a base is packed only once | `adapt.c` |
| `is_narrow` | the sampler: narrow models decode with one thread through torch, too | |
| `product` | the sampler's and the learner's products of a few rows with a large weight | `product.c` |
| `pick` | `trainer/sampler/draw_token.py`: tokens drawn from a large vocabulary | `pick.c` |
| `release_memory` | benchmarks: gives back the memory that passes left behind | |

The other exports are the types that these take and return.
"""

from trainer.native.decode import (
    Drawing,
    KeyValueCache,
    NativeDecoder,
    RowInput,
    native_decoder,
)
from trainer.native.learn import LearnerPass, learner_pass, release_memory
from trainer.native.packed_weights import PackedBases
from trainer.native.pick import pick
from trainer.native.product import product
from trainer.native.supported_models import is_narrow

__all__ = [
    "Drawing",
    "KeyValueCache",
    "LearnerPass",
    "NativeDecoder",
    "PackedBases",
    "RowInput",
    "is_narrow",
    "learner_pass",
    "native_decoder",
    "pick",
    "product",
    "release_memory",
]
