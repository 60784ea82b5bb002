"""A decode batch for one CUDA GPU. A step is recorded once per padded number of rows, and replayed.

On a GPU a step of a small model consists of a thousand kernels, and each takes longer to start than to
run. Replayed as one CUDA graph they cost nothing to start, provided that all tensors stay where they
are. So token, position, temperature and random number of each row, the cache and the adapter are in
buffers that are written and never replaced. A step reads the token that the previous one drew, so
several steps are replayed before the host reads results. Tokens that a row drew after its end are
dropped. The random numbers are those of every other engine, a function of the row and the position, and
are written to the buffers before the steps run.

Without a GPU the recorded step is called instead of replayed. Everything else is the same, and is tested
that way.

Legend: R rows, S steps of a burst, A query heads, K key heads, D head size, C capacity.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from trainer.forward.decoder import Attend
from trainer.forward.weights import Trainable
from trainer.sampler.decode_batch import DecodeBatch, hidden_places
from trainer.sampler.decode_model import DecodeModel, UnfusedModel
from trainer.sampler.draw_token_gpu import draw_on_gpu

BURST = 8
"""Steps before the host reads results. A row that ends wastes half of them on average."""
WARM_UP = 3


def padded_rows(num_rows: int, most: int) -> int:
    """The number of rows that a step is recorded for: a power of two, at most `most`."""
    return min(most, 1 << max(0, num_rows - 1).bit_length())


class CudaGraphBatch(DecodeBatch):
    """Up to `size` rows of one version."""

    def __init__(
        self, model: DecodeModel, *, capacity: int, size: int, fixed: bool = False
    ) -> None:
        own = _with_own_adapter(model)
        super().__init__(own, capacity=capacity, size=size, fixed=fixed)
        integers = torch.zeros(2, size, dtype=torch.long, device=self.device)
        self._token_R, self._position_R = integers
        self._temperature_R = torch.ones(size, device=self.device)
        self._uniform_S_R = torch.zeros(BURST, size, dtype=torch.float64, device=self.device)
        self._drawn_S_2_R = torch.zeros(BURST, 2, size, dtype=torch.float64, device=self.device)
        self._turn = torch.zeros(1, dtype=torch.long, device=self.device)
        self._slot_R = torch.arange(size, device=self.device)
        self._recorded: dict[int, Callable[[], None]] = {}

    def can_serve(self, model: DecodeModel) -> bool:
        """Whether this version has the same base, adapted in the same places."""
        if not isinstance(model, UnfusedModel) or not isinstance(self.model, UnfusedModel):
            return False
        held, new = self.model.view, model.view
        return (
            held.base.keys() == new.base.keys()
            and all(tensor is new.base[name] for name, tensor in held.base.items())
            and held.scale == new.scale
            and _shapes(held) == _shapes(new)
        )

    def serve(self, model: DecodeModel) -> None:
        """Serve another version that `can_serve` accepts. Its adapter is copied to where the recorded
        steps read it."""
        held = _parts(_unfuse(self.model).view)
        for module, parts in _parts(_unfuse(model).view).items():
            for own, theirs in zip(held[module], parts, strict=True):
                own.copy_(theirs)

    def step(self) -> int:
        """Draw the next tokens of every row, up to BURST of them: one step for the host."""
        if any(row.params.top_p < 1 or row.grammar is not None for row in self.rows):
            return super().step()
        num = padded_rows(len(self.rows), self.size)
        turns = self._turns()
        self._lay_out(num, turns)
        run = self._recorded.get(num) or self._recorded.setdefault(num, self._record(num))
        for _ in range(turns):
            run()
        drawn_S_2_R = self._drawn_S_2_R[:turns, :, : len(self.rows)].tolist()
        for tokens, logprobs in drawn_S_2_R:
            for row, token, logprob in zip(self.rows, tokens, logprobs, strict=True):
                if not row.is_over:
                    row.append(int(token), logprob)
        return 1

    def _turns(self) -> int:
        """The steps that the longest row has room for, at most as many as any row may still draw."""
        room = self.capacity + 1 - max(row.length for row in self.rows)
        wanted = max(row.max_new_tokens - len(row.completion_ids) for row in self.rows)
        return max(1, min(BURST, room, wanted))

    def _lay_out(self, num: int, turns: int) -> None:
        """Write the buffers that the next steps read. Padding rows draw tokens that are dropped."""
        spare = num - len(self.rows)
        tokens = [row.completion_ids[-1] for row in self.rows] + [0] * spare
        positions = [row.length - 1 for row in self.rows] + [0] * spare
        temperatures = [row.params.temperature for row in self.rows] + [1.0] * spare
        uniforms = [
            [row.uniform(turn) for row in self.rows] + [0.0] * spare for turn in range(turns)
        ]
        self._token_R[:num] = torch.tensor(tokens)
        self._position_R[:num] = torch.tensor(positions)
        self._temperature_R[:num] = torch.tensor(temperatures)
        self._uniform_S_R[:turns, :num] = torch.tensor(uniforms, dtype=torch.float64)
        self._turn.zero_()

    def _record(self, num: int) -> Callable[[], None]:
        def run() -> None:
            self._advance(num)

        if self.device.type != "cuda":
            return run
        state = [t.clone() for t in self._state]
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), _each_place_once():
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    run()
            torch.cuda.current_stream(self.device).wait_stream(stream)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                run()
        for held, before in zip(self._state, state, strict=True):
            held.copy_(before)
        return graph.replay

    @property
    def _state(self) -> tuple[torch.Tensor, ...]:
        """The tensors that a step advances. The cache is not one of them, because the places that
        warming up writes are written again before a step reads them."""
        return self._token_R, self._position_R, self._turn

    @torch.inference_mode()
    def _advance(self, num: int) -> None:
        """One step of `num` rows. It reads and writes buffers only."""
        token_R, position_R = self._token_R[:num], self._position_R[:num]
        hidden_R_H = self.model.hidden_states(
            token_R, position_R, self._static_attend(num, position_R)
        )
        uniform_R = self._uniform_S_R.index_select(0, self._turn)[0, :num]
        next_R, logprob_R = draw_on_gpu(
            self.model.logits(hidden_R_H), self._temperature_R[:num], uniform_R
        )
        drawn_2_R = torch.stack([next_R.double(), logprob_R])
        self._drawn_S_2_R[:, :, :num].index_copy_(0, self._turn, drawn_2_R[None])
        token_R.copy_(next_R)
        # A row that has ended still takes the remaining steps of a burst; keep it inside the cache.
        position_R.add_(1).clamp_(max=self.capacity - 1)
        self._turn.add_(1).clamp_(max=BURST - 1)

    def _static_attend(self, num: int, position_R: torch.Tensor) -> Attend:
        """Attention over the whole capacity, because the shape of a recorded step is fixed."""
        slot_R = self._slot_R[:num]
        windows = self.decoder.windows
        unseen = {
            window: hidden_places(self._places, position_R, window)[:, None, None, :]
            for window in dict.fromkeys(windows)
        }

        def attend(
            layer: int, q_R_A_D: torch.Tensor, k_R_K_D: torch.Tensor, v_R_K_D: torch.Tensor
        ) -> torch.Tensor:
            keys, values = self.keys[layer, :num], self.values[layer, :num]
            keys[slot_R, :, position_R] = k_R_K_D
            values[slot_R, :, position_R] = v_R_K_D
            size = q_R_A_D.shape[-1]
            q = (q_R_A_D * size**-0.5).reshape(num, keys.shape[1], -1, size)
            scores = q @ keys.transpose(-1, -2)
            scores = scores.masked_fill(unseen[windows[layer]], float("-inf"))
            weights = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype)
            return (weights @ values).reshape(num, -1)

        return attend


@contextmanager
def _each_place_once() -> Iterator[None]:
    """Writing to the cache by index is deterministic here, since no two rows share a slot. PyTorch
    cannot know that and would sort the indices first."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)


def _shapes(view: Trainable) -> dict[str, tuple[torch.Size, ...]]:
    return {module: tuple(t.shape for t in parts) for module, parts in _parts(view).items()}


def _parts(view: Trainable) -> dict[str, tuple[torch.Tensor, ...]]:
    """The tensors of each adapter: A and B, and the factors of its outputs if it is a DoRA."""
    factors = {module: (factor,) for module, factor in view.factors.items()}
    return {module: (*pair, *factors.get(module, ())) for module, pair in view.pairs.items()}


def _unfuse(model: DecodeModel) -> UnfusedModel:
    if not isinstance(model, UnfusedModel):
        raise ValueError("a recorded step needs base and adapter apart")
    return model


def _with_own_adapter(model: DecodeModel) -> UnfusedModel:
    """The same version with a copy of its adapter, which `serve` overwrites."""
    apart = _unfuse(model)
    pairs = {module: (a.clone(), b.clone()) for module, (a, b) in apart.view.pairs.items()}
    factors = {module: factor.clone() for module, factor in apart.view.factors.items()}
    view: Trainable = replace(apart.view, pairs=pairs, factors=factors)
    return replace(apart, view=view)
