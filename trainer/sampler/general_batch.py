"""Samples rows through Transformers' module and cache, several at once where that is the same.

Rows of one version whose prompts differ in length are padded on the left. A row that has ended leaves
the others. Which rows are together depends on which have arrived, and with it the last bits of their
logits. So a row of a deterministic run is alone, and so is every row of a model in which padding
changes more than the last bits (`Fallback.has_independent_rows`).

Legend: R rows, T tokens that are read, U all tokens so far with padding.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from transformers import Cache

from trainer.sampler.completion import Completion, draw_parameters
from trainer.sampler.draw_token import draw_tokens
from trainer.sampler.memory_limits import MemoryLimits

MOST_ROWS = 16


def batches_of(
    rows: Sequence[Completion], *, limits: MemoryLimits
) -> Iterator[Sequence[Completion]]:
    """The rows in order, divided into those that are sampled together."""
    together: list[Completion] = []
    for key, alike in groupby(rows, key=lambda row: (row.version.key, row.params.deterministic)):
        for row in alike:
            wanted = [*together, row]
            if together and not _fits(wanted, is_fixed=key[1], limits=limits):
                yield together
                wanted = [row]
            together = wanted
        yield together
        together = []


def _fits(rows: Sequence[Completion], *, is_fixed: bool, limits: MemoryLimits) -> bool:
    """Whether these rows of one version are sampled together. Memory is counted as if the keys and
    values of a layer were as wide as its hidden states, which they are at most."""
    loaded = rows[0].version.loaded
    if is_fixed or len(rows) > MOST_ROWS or not loaded.fallback.has_independent_rows:
        return False
    text = loaded.base.model.config.get_text_config()
    longest = max(len(row.prompt_ids) for row in rows) + max(row.max_new_tokens for row in rows)
    per_token = 2 * text.num_hidden_layers * text.hidden_size * loaded.base.model.dtype.itemsize
    return len(rows) * longest * per_token <= limits.rows_bytes


@torch.no_grad()
def sample_through_transformers(rows: Sequence[Completion]) -> None:
    """Sample the whole completions of these rows of one version."""
    if len(rows) == 1:
        _sample_alone(rows[0])
        return
    version, active = rows[0].version, list(rows)
    fallback, device = version.loaded.fallback, version.loaded.base.model.device
    longest = max(len(row.prompt_ids) for row in rows)
    short = [longest - len(row.prompt_ids) for row in rows]
    ids = [(*(0,) * num, *row.prompt_ids) for num, row in zip(short, rows, strict=True)]
    ids_R_T = torch.tensor(ids, device=device)
    places_U = torch.arange(longest, device=device)
    valid_R_U = places_U >= torch.tensor(short, device=device)[:, None]
    cache: Cache | None = None
    while True:
        logits_R_V, cache = fallback.extend_rows(
            version.trained, ids_R_T, cache, scaling=version.scaling, valid_R_U=valid_R_U
        )
        drawn = draw_tokens(logits_R_V, **draw_parameters(active, len(active)))
        for row, token, logprob in zip(active, *drawn, strict=True):
            row.append(token, logprob)
        going = [i for i, row in enumerate(active) if not row.is_over]
        if not going:
            return
        if len(going) < len(active):
            kept_R = torch.tensor(going, device=device)
            cache.batch_select_indices(kept_R)
            valid_R_U = valid_R_U[kept_R]
            active = [active[i] for i in going]
        ids_R_T = torch.tensor([row.completion_ids[-1:] for row in active], device=device)
        valid_R_U = F.pad(valid_R_U, (0, 1), value=True)


def _sample_alone(row: Completion) -> None:
    version = row.version
    fallback, device = version.loaded.fallback, version.loaded.base.model.device
    ids, cache = list(row.prompt_ids), None
    while not row.is_over:
        ids_T = torch.tensor(ids, device=device)
        logits_V, cache = fallback.extend(version.trained, ids_T, cache, scaling=version.scaling)
        tokens, logprobs = draw_tokens(logits_V[None], **draw_parameters([row], 1))
        row.append(tokens[0], logprobs[0])
        ids = row.completion_ids[-1:]
