"""A decode batch: rows that decode together, over one key-value cache of fixed capacity.

With `fixed` the shapes of a step never change: the number of rows (filled up with dummies) and the
capacity do not depend on which rows are there. A row's bits then depend only on that row, which
`has_independent_rows` checks on this machine before a batch is used. They do not depend on a compiler
either, because fixed batches always decode through torch, or with its bits
(`trainer/native/product.py`): a worker that cannot compile `decode.c` now (for example on a full disk)
must continue with the same bits. Without `fixed` a step computes only the rows that are there.

Legend: R rows, A query heads, K key heads, G query heads per key head, C capacity, D head size.
"""

from contextlib import AbstractContextManager

import torch

from trainer.device_thread import limit_threads
from trainer.forward.decoder import Attend, Decoder
from trainer.sampler.completion import Completion, draw_parameters
from trainer.sampler.decode_model import DecodeModel
from trainer.sampler.draw_token import draw_tokens
from trainer.sampler.prefill import Prompt, TorchPrompt

STEPS_OF_CAPACITY = (32, 64, 128, 192, 256, 384, 512, 768)
ROUND_ROWS = 8
ROUND_PLACES = 16


def capacity_for(length: int) -> int:
    """The capacity for a row of this length. It depends on nothing else."""
    for capacity in STEPS_OF_CAPACITY:
        if length <= capacity:
            return capacity
    return -(-length // 512) * 512


def hidden_places(
    places_C: torch.Tensor, positions_R: torch.Tensor, window: int | None
) -> torch.Tensor:
    """[r, c]: whether the token that row r reads now does not see the place. With a window it sees as
    many places as that has, the last of them its own."""
    hidden_R_C = places_C > positions_R[:, None]
    return (
        hidden_R_C if window is None else hidden_R_C | (places_C <= positions_R[:, None] - window)
    )


def row_bytes(decoder: Decoder, capacity: int, dtype: torch.dtype) -> int:
    """The bytes of one row's cache: keys and values, in the type of the computation."""
    places = decoder.num_layers * decoder.kv_heads * capacity
    return 2 * dtype.itemsize * places * decoder.head_dim


class DecodeBatch:
    """Up to `size` rows of one version. Keys and values are (layers, R, K, C, D)."""

    def __init__(self, model: DecodeModel, *, capacity: int, size: int, fixed: bool) -> None:
        decoder, embedding = model.decoder, model.embedding
        self.model = model
        self.capacity, self.size, self.fixed = capacity, size, fixed
        self.device = embedding.device
        self.row_bytes = row_bytes(decoder, capacity, embedding.dtype)
        self.rows: list[Completion] = []
        self._allocate()

    def _allocate(self) -> None:
        decoder, embedding = self.decoder, self.model.embedding
        shape = (decoder.num_layers, self.size, decoder.kv_heads, self.capacity, decoder.head_dim)
        self.keys = torch.zeros(shape, dtype=embedding.dtype, device=self.device)
        self.values = torch.zeros_like(self.keys)
        starts = torch.arange(self.size * decoder.kv_heads, device=self.device) * self.capacity
        self._starts_R_K = starts.view(self.size, decoder.kv_heads)
        self._places = torch.arange(self.capacity, device=self.device)

    @staticmethod
    def capacity_of(row: Completion) -> int:
        """The capacity of the batch that a row begins in, or moves to."""
        return capacity_for(row.length)

    @property
    def decoder(self) -> Decoder:
        return self.model.decoder

    @property
    def used_bytes(self) -> int:
        """The bytes of the cache that its rows use."""
        return len(self.rows) * self.row_bytes

    def can_serve(self, model: DecodeModel) -> bool:
        """Whether an empty batch can serve this version next."""
        return model.decoder is self.decoder

    def serve(self, model: DecodeModel) -> None:
        """Serve another version."""
        self.model = model

    @property
    def is_full(self) -> bool:
        return len(self.rows) >= self.size

    def is_outgrown_by(self, row: Completion) -> bool:
        """Whether this batch has no room for the row's next step."""
        return row.length > self.capacity

    def add(self, row: Completion, prompt: Prompt) -> None:
        """Add a row that has drawn its first token."""
        if not isinstance(prompt, TorchPrompt):
            kind = type(prompt).__name__
            raise TypeError(f"a {kind} is not a prompt for this batch: read it through torch")
        self._put(row, prompt.keys, prompt.values)

    def take_over(self, row: Completion, other: "DecodeBatch") -> None:
        """Take a row over from a batch that it has outgrown."""
        slot, length = other.rows.index(row), row.length - 1
        self._put(row, *(cache[:, slot, :, :length] for cache in (other.keys, other.values)))
        other.remove(row)

    def _put(self, row: Completion, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add a row with its cache so far, (layers, K, length, D) each. The rest of the slot is cleared,
        because a NaN left by another row would pass through its zero weight."""
        slot, length = len(self.rows), keys.shape[2]
        for own, held in ((keys, self.keys), (values, self.values)):
            held[:, slot, :, :length] = own
            held[:, slot, :, length:] = 0
        self.rows.append(row)

    def remove(self, row: Completion) -> None:
        """Remove a row. The last row moves into its slot."""
        slot, last = self.rows.index(row), len(self.rows) - 1
        if slot != last:
            self.keys[:, slot] = self.keys[:, last]
            self.values[:, slot] = self.values[:, last]
            self.rows[slot] = self.rows[last]
        self.rows.pop()

    def step(self) -> int:
        """Draw the next token of every row, or the next few. Returns how many steps of a turn that
        counts as."""
        num = self.size if self.fixed else min(self.size, -(-len(self.rows) // ROUND_ROWS) * 8)
        spare = [0] * (num - len(self.rows))
        tokens = [row.completion_ids[-1] for row in self.rows] + spare
        positions = [row.length - 1 for row in self.rows] + spare
        logits_R_V = self.logits(
            torch.tensor(tokens, device=self.device), torch.tensor(positions, device=self.device)
        )
        with self._threads():
            drawn = draw_tokens(logits_R_V, **draw_parameters(self.rows, num))
        for row, token, logprob in zip(self.rows, *drawn, strict=False):
            row.append(token, logprob)
        return 1

    @torch.inference_mode()
    def logits(self, tokens_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        """Read one token per row into the cache. Returns the logits (R, vocabulary) after it."""
        with self._threads():
            attend = self._attend(positions_R, self._num_places())
            return self.model.logits(self.model.hidden_states(tokens_R, positions_R, attend))

    def _threads(self) -> AbstractContextManager[None]:
        return limit_threads(1 if self.model.is_narrow else torch.get_num_threads())

    def _num_places(self) -> int:
        """How many places of the cache a step reads: all of them where shapes are fixed, else as many as
        the longest row has, since reading the cache is most of the cost of attention."""
        if self.fixed or not self.rows:
            return self.capacity
        longest = max(row.length for row in self.rows)
        return min(self.capacity, -(-longest // ROUND_PLACES) * ROUND_PLACES)

    def _attend(self, positions_R: torch.Tensor, seen: int) -> Attend:
        num, size, kv_heads = len(positions_R), self.decoder.head_dim, self.decoder.kv_heads
        at = (self._starts_R_K[:num] + positions_R[:, None]).flatten()
        windows = self.decoder.windows
        unseen = {
            window: self._unseen(positions_R, seen, window).repeat_interleave(kv_heads, dim=0)[
                :, None
            ]
            for window in dict.fromkeys(windows)
        }

        def attend(
            layer: int, q_R_A_D: torch.Tensor, k_R_K_D: torch.Tensor, v_R_K_D: torch.Tensor
        ) -> torch.Tensor:
            seen_keys, seen_values = (
                self._write_entries(cache[layer], at, new)[: num * kv_heads, :seen]
                for cache, new in ((self.keys, k_R_K_D), (self.values, v_R_K_D))
            )
            q = q_R_A_D.reshape(num * kv_heads, -1, size)
            keys = seen_keys.transpose(1, 2)
            scores = torch.baddbmm(unseen[windows[layer]], q, keys, alpha=size**-0.5)
            return torch.bmm(scores.softmax(dim=-1), seen_values).view(num, -1)

        return attend

    def _unseen(self, positions_R: torch.Tensor, seen: int, window: int | None) -> torch.Tensor:
        """The summand (R, C) of the scores: -inf where a row does not see a place."""
        is_hidden_R_C = hidden_places(self._places[:seen], positions_R, window)
        unseen_R_C = self.keys.new_zeros(len(positions_R), seen)
        return unseen_R_C.masked_fill_(is_hidden_R_C, float("-inf"))

    def _write_entries(
        self, cache: torch.Tensor, at: torch.Tensor, new_R_K_D: torch.Tensor
    ) -> torch.Tensor:
        """Write the new entries. Returns the cache of the layer as (R * K, C, D)."""
        size = new_R_K_D.shape[-1]
        cache.view(-1, size).index_copy_(0, at, new_R_K_D.reshape(-1, size))
        return cache.flatten(0, 1)


def has_independent_rows(batch: DecodeBatch) -> bool:
    """Whether a row's bits depend neither on its slot nor on the other rows, on this machine. The same
    row is computed in two slots, among other rows and alone. Leaves the batch empty."""
    if batch.size == 1:
        return True
    generator = torch.Generator().manual_seed(0)
    shape = batch.keys.shape
    keys = torch.randn(shape, generator=generator).to(batch.keys)
    values = torch.randn(shape, generator=generator).to(batch.keys)
    vocabulary = len(batch.model.embedding)
    tokens_R = torch.arange(batch.size, device=batch.device) % vocabulary
    positions_R = (torch.arange(batch.size, device=batch.device) * 7) % batch.capacity
    order_R = torch.arange(batch.size, device=batch.device).roll(batch.size // 2 + 1)

    def compute(chosen_R: torch.Tensor, kept_R: torch.Tensor) -> torch.Tensor:
        """The logits and the drawn logprob of each row, side by side."""
        mask = kept_R.to(keys.dtype)
        batch.keys.copy_(keys[:, chosen_R] * mask[:, None, None, None])
        batch.values.copy_(values[:, chosen_R] * mask[:, None, None, None])
        logits_R_V = batch.logits(tokens_R[chosen_R] * kept_R, positions_R[chosen_R] * kept_R)
        ones = [1.0] * batch.size
        _, drawn = draw_tokens(
            logits_R_V, temperatures=ones, top_ps=ones, uniforms=[0.5] * batch.size
        )
        drawn_R_1 = torch.tensor(drawn, dtype=torch.float64, device=batch.device)[:, None]
        return torch.cat([logits_R_V.double(), drawn_R_1], dim=-1)

    everyone_R = torch.ones_like(order_R)
    first = compute(order_R.sort().values, everyone_R)
    moved = compute(order_R, everyone_R)
    alone_R = torch.zeros_like(order_R)
    alone_R[batch.size // 3] = 1
    alone = compute(order_R, alone_R)
    at = batch.size // 3
    batch.keys.zero_()
    batch.values.zero_()
    return bool(torch.equal(first[order_R], moved) and torch.equal(alone[at], moved[at]))
