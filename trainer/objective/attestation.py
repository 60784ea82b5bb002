"""Attestation: whether sampled tokens come from the policy version that the log names.

The learner computes the logprob of every sampled token again. Two tests read the results, and both bet
against their null hypothesis, token by token. A bet multiplies the wealth by a factor whose mean, given
all tokens before, is at most 1 if the hypothesis is true. The wealth is then an e-process: by Ville's
inequality it ever reaches 1 / ALPHA with a probability of at most ALPHA, however long the sample is and
whenever one looks (Ramdas, Grünwald, Vovk, Shafer: Game-theoretic statistics and safe anytime-valid
inference, arXiv 2210.01948; bets on a bounded mean: Waudby-Smith, Ramdas, arXiv 2010.09686).

*Distance.* d_t = logprob computed - logprob recorded. Hypothesis: the mean of |d_t|, given the tokens
before, is at most m. A bet of b in (0, 1) has the factor 1 + b (|d_t| / m - 1). It assumes nothing else
about the noise, in particular no Gaussian tail: one outlier of 1000 m multiplies the wealth by less than
1000, and tokens with less than m of noise take that back. m is SLACK times the noise that the canary
measured of this server (`trainer/sampler/vllm/canary.py`), or a bound for this number format.

*Draws.* A server may report the right logprobs of tokens that it drew in another way, for example at
another temperature. Hypothesis: the token is drawn from the learner's distribution p over V tokens. With
L_t = -log p(x_t) and its entropy H_t it follows that E L_t = H_t and E exp(L_t) <= V. So these factors
have a mean of at most 1, whatever p is, and need nothing that the learner does not compute anyway:

    too random    1 + b (L_t - H_t) / (1 + H_t)
    too certain   (1 + b (H_t - L_t) + c_t exp(L_t)) / (1 + c_t V),   c_t = b exp(-1 - 1/b - H_t)

c_t is the smallest number that keeps the second factor from being negative: the tangent at its minimum.

Wealth starts split evenly over several bets, and their sum is an e-process again. The tests of a sample
stay valid if samples are selected by their content (filtered, failed), because each of them is below
ALPHA whatever is selected. The product over all samples of a server would not, so only the test of the
distance is also taken over all tokens of a server in the step: it finds small mistakes that no single
sample shows.

Shape suffixes: E all tokens that were seen, M the actions of one micro-batch, K bets.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from schemas.learner import GradedGroup, Refutation, RefutingTest, SamplesRefuted
from schemas.models.sampling_server import server_of
from schemas.sampling import SampleRecord
from trainer.forward.packing import MicroBatch

ALPHA = 1e-10
"""The level of each test. Of 10 million samples, 0.003 are refuted by mistake on average."""
SLACK = 4.0
"""How much larger than the measured noise the mean distance may be: the canary measures few tokens."""
EXACT_BOUND = 5e-5
"""The smallest bound of the mean distance, in nats. In float32 on a CPU the distance is about 2e-7."""
CUDA_BOUND = 2e-2
BFLOAT16_BOUND = 2e-1
"""Bounds of engines whose noise nothing has measured. In bfloat16 it is some hundredths."""
MOST = 1e12
"""A distance that is infinite, or not a number, counts as this."""
RECHECKED = 1 / 64
"""The largest share of the samples that is computed again where an earlier version made them."""
SUSPICIOUS = 3.0
"""These are samples whose mean distance from the trained version is so many times the median."""
EVERY = 10
"""In one step of so many, as many samples are computed again in turn."""
RECHECKED_TOKENS = 64
"""How many actions of each of them, from its first one on."""
DISTANCE_BETS = (0.02, 0.1, 0.5, 0.9)
RANDOM_BETS = (0.05, 0.3)
CERTAIN_COST = 0.01
"""The most that the second factor of the draws may lose to its correction in a token, roughly."""


def bound_of(record: SampleRecord, default: float) -> float:
    """The bound m of a sample, in nats: SLACK times the noise of its servers, or `default`."""
    noises = [server.noise for server in record.servers]
    if not noises:
        return default
    return max(EXACT_BOUND, SLACK * max(noises))


def bounds_of(
    records: Sequence[SampleRecord], means: Sequence[float | None], default: float
) -> list[float]:
    """The bound of each sample. `means` are their mean distances (None: nothing was seen of a sample).

    The canary measures the noise of a server with a few easy tokens, and the tokens of a run may be
    harder. So the bound of a server that does not compute exactly is also SLACK times the median of
    its samples, up to BFLOAT16_BOUND. A larger bound only makes each factor smaller, so the tests stay
    valid.
    """
    seen: dict[str, list[float]] = defaultdict(list)
    for record, mean in zip(records, means, strict=True):
        if mean is not None:
            seen[server_of(record.servers)].append(mean)
    medians = {server: statistics.median_low(found) for server, found in seen.items()}
    bounds = []
    for record in records:
        bound = bound_of(record, default)
        if record.servers and bound > EXACT_BOUND:
            usual = SLACK * medians.get(server_of(record.servers), 0.0)
            bound = max(bound, min(usual, BFLOAT16_BOUND))
        bounds.append(bound)
    return bounds


def default_bound(device: torch.device, dtype: torch.dtype) -> float:
    """The bound for samples of the built-in sampler on such a device, with a base of this format."""
    if dtype != torch.float32:
        return BFLOAT16_BOUND
    return CUDA_BOUND if device.type != "cpu" else EXACT_BOUND


def distance_terms(ratio_E: torch.Tensor) -> torch.Tensor:
    """(E, K): the log of each factor of the test of the distance. `ratio_E` is |d| / m."""
    bets_K = torch.tensor(DISTANCE_BETS, dtype=torch.float64)
    return torch.log1p(bets_K * (ratio_E[:, None] - 1))


def draw_terms(loss_E: torch.Tensor, entropy_E: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """(E, K): the log of each factor of the test of the draws. `loss_E` is -log p of the tokens, and
    `entropy_E` the entropy of p, both in nats."""
    excess_E = loss_E - entropy_E
    columns = [torch.log1p(bet * excess_E / (1 + entropy_E)) for bet in RANDOM_BETS]
    most = _certain_bet(vocabulary)
    for bet in (most, most / 3):
        c_E = bet * torch.exp(-1 - 1 / bet - entropy_E)
        factor_E = (1 - bet * excess_E + c_E * loss_E.exp()).clamp(min=1e-12)
        columns.append(factor_E.log() - torch.log1p(c_E * vocabulary))
    return torch.stack(columns, dim=1)


def _certain_bet(vocabulary: int) -> float:
    """The largest bet b whose correction costs at most CERTAIN_COST at an entropy of 0."""
    bet = 1.0
    for _ in range(8):
        bet = 1 / max(1.0, math.log(bet * vocabulary / CERTAIN_COST) - 1)
    return min(0.5, bet)


def log_wealth(terms_E_K: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
    """(E): the log of the wealth after each token. Another process begins at each of `starts`."""
    total_E_K = terms_E_K.cumsum(dim=0)
    before_E_K = torch.cat([torch.zeros_like(total_E_K[:1]), total_E_K[:-1]])
    sizes = [*starts[1:], len(terms_E_K)]
    counts = torch.tensor([end - start for start, end in zip(starts, sizes, strict=True)])
    offset_E_K = before_E_K[torch.tensor(starts)].repeat_interleave(counts, dim=0)
    return torch.logsumexp(total_E_K - offset_E_K, dim=1) - math.log(terms_E_K.shape[1])


Recheck = Callable[[Sequence[int]], Iterator[tuple[MicroBatch, torch.Tensor, torch.Tensor]]]
"""Computes the beginnings of some samples with the weights that sampled them: micro-batches, and the
logprobs (M) and entropies (M) of their actions."""


@dataclass(slots=True)
class Witness:
    """Sees the logprobs of a step's forward pass, and judges them once. `default` is the bound of
    samples whose server measured no noise, and `vocabulary` the number of tokens of the model. `scale`
    multiplies all bounds, because a temperature below 1 magnifies the noise of logits.

    If an earlier version than the one of the pass made the samples, `recheck` computes some of them with
    that version, and only these are tested: those whose logprobs differ most, because samples of wrong
    weights do, and others in turn (`step` is the number of the step).
    """

    groups: Sequence[GradedGroup]
    default: float
    vocabulary: int
    scale: float = 1.0
    recheck: Recheck | None = None
    step: int = 0
    _is_done: bool = False
    _sample: list[torch.Tensor] = field(default_factory=list)
    _seen: list[torch.Tensor] = field(default_factory=list)

    def see(self, micro: MicroBatch, logprob_M: torch.Tensor, entropy_M: torch.Tensor) -> None:
        """Note the logprobs and entropies of a micro-batch, until they are judged: later ones are those
        of a policy that was updated."""
        if self._is_done:
            return
        seen = (logprob_M.detach(), micro.behaviour_M, entropy_M.detach())
        self._sample.append(micro.sample_M.cpu())
        self._seen.append(torch.stack([one.double().cpu() for one in seen], dim=1))

    def judge(self) -> dict[str, float]:
        """Return the metrics of what was seen, by key. Raises SamplesRefuted if a test failed. Tokens
        that the learner itself has no finite logprob for prove nothing, and are not counted."""
        if self.recheck is not None and self._seen:
            chosen = self._chosen_samples()
            seen = list(self.recheck(chosen)) if chosen else []
            self._sample.clear()
            self._seen.clear()
            for micro, logprob_M, entropy_M in seen:
                self.see(micro, logprob_M, entropy_M)
        self._is_done = True
        records = [(g.slot, sample) for g in self.groups for sample in g.samples]
        total = sum(sum(row.loss_mask[1:]) for _, sample in records for row in sample.sequences)
        sample_E = torch.cat([torch.zeros(0, dtype=torch.long), *self._sample])
        order_E = sample_E.argsort(stable=True)
        logprob_E, behaviour_E, entropy_E = torch.cat(
            [torch.zeros(0, 3, dtype=torch.float64), *self._seen]
        )[order_E].unbind(dim=1)
        sample_E = sample_E[order_E]
        known_E = logprob_E.isfinite() & entropy_E.isfinite()
        sample_E, logprob_E = sample_E[known_E], logprob_E[known_E]
        metrics = {
            "attest/tokens": float(len(sample_E)),
            "attest/share": len(sample_E) / max(1, total),
        }
        if not len(sample_E):
            return metrics
        distance_E = (logprob_E - behaviour_E[known_E]).abs().nan_to_num(nan=MOST, posinf=MOST)
        counts = sample_E.bincount(minlength=len(records))
        sums = torch.zeros(len(records), dtype=torch.float64).index_add_(0, sample_E, distance_E)
        means = [
            total / number if number else None
            for total, number in zip(sums.tolist(), counts.tolist(), strict=True)
        ]
        bounds = bounds_of([record for _, record in records], means, self.default)
        ratio_E = distance_E / (self.scale * torch.tensor(bounds, dtype=torch.float64))[sample_E]
        terms: dict[RefutingTest, torch.Tensor] = {
            "distance": distance_terms(ratio_E),
            "draws": draw_terms(-logprob_E, entropy_E[known_E], self.vocabulary),
        }
        is_near = float(ratio_E.max()) <= 1  # then no bet on the distance ever won
        if is_near:
            del terms["distance"]
        found = self._judge_samples(records, sample_E, distance_E, terms)
        if not is_near:
            distance = terms["distance"]
            found |= self._judge_servers(records, sample_E, distance_E, distance, found)
        if found:
            raise SamplesRefuted(tuple(found[number] for number in sorted(found)))
        metrics["attest/distance"] = float(distance_E.mean())
        return metrics | _metrics_of_servers(records, sample_E, distance_E)

    def _chosen_samples(self) -> list[int]:
        """The samples that are computed again."""
        sample_E, seen_E = torch.cat(self._sample), torch.cat(self._seen)
        distance_E = (seen_E[:, 0] - seen_E[:, 1]).abs().nan_to_num(nan=MOST, posinf=MOST)
        numbers, place_E = sample_E.unique(return_inverse=True)
        sums = torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, place_E, distance_E)
        means = sums / place_E.bincount(minlength=len(numbers))
        by_distance = numbers[means.argsort(descending=True, stable=True)].tolist()
        most = max(1, round(len(by_distance) * RECHECKED))
        num_suspects = int((means > SUSPICIOUS * means.median()).sum())
        chosen = set(by_distance[: min(most, num_suspects)])
        if self.step % EVERY == 0:
            first = self.step // EVERY * most
            chosen |= {int(numbers[(first + n) % len(numbers)]) for n in range(most)}
        return sorted(chosen)

    def _judge_samples(
        self,
        records: Sequence[tuple[int, SampleRecord]],
        sample_E: torch.Tensor,
        distance_E: torch.Tensor,
        terms: Mapping[RefutingTest, torch.Tensor],
    ) -> dict[int, Refutation]:
        numbers, counts = sample_E.unique_consecutive(return_counts=True)
        ends = counts.cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        found: dict[int, Refutation] = {}
        for test, terms_E_K in terms.items():
            wealth_E = log_wealth(terms_E_K, starts)
            if not bool((wealth_E >= -math.log(ALPHA)).any()):
                continue
            for number, start, end in zip(numbers.tolist(), starts, ends, strict=True):
                crossed = _first_crossing(wealth_E[start:end])
                if crossed is not None and number not in found:
                    slot, record = records[number]
                    found[number] = Refutation(
                        slot=slot,
                        index=record.index,
                        server=server_of(record.servers),
                        test=test,
                        tokens=crossed,
                        log_e=_cap(wealth_E[start:end].max()),
                        distance=_cap(distance_E[start:end].mean()),
                    )
        return found

    def _judge_servers(
        self,
        records: Sequence[tuple[int, SampleRecord]],
        sample_E: torch.Tensor,
        distance_E: torch.Tensor,
        terms_E_K: torch.Tensor,
        known: dict[int, Refutation],
    ) -> dict[int, Refutation]:
        """Refute all other samples of a server whose tokens together fail the test of the distance. A
        sample that was refuted by itself says nothing more about the others, so it is left out."""
        of: dict[str, list[int]] = defaultdict(list)
        for number, (_, record) in enumerate(records):
            if number not in known:
                of[server_of(record.servers)].append(number)
        found: dict[int, Refutation] = {}
        for server, numbers in of.items():
            mine_E = torch.isin(sample_E, torch.tensor(numbers))
            if not bool(mine_E.any()):
                continue
            wealth_E = log_wealth(terms_E_K[mine_E], [0])
            crossed = _first_crossing(wealth_E)
            if crossed is None:
                continue
            for number in numbers:
                slot, record = records[number]
                found[number] = Refutation(
                    slot=slot,
                    index=record.index,
                    server=server,
                    test="server",
                    tokens=crossed,
                    log_e=_cap(wealth_E.max()),
                    distance=_cap(distance_E[mine_E].mean()),
                )
        return found


def _metrics_of_servers(
    records: Sequence[tuple[int, SampleRecord]], sample_E: torch.Tensor, distance_E: torch.Tensor
) -> dict[str, float]:
    """The tested tokens of each server and their mean distance, under its host and port."""
    named = [record.servers[-1].url if record.servers else None for _, record in records]
    found: dict[str, float] = {}
    for url in sorted({name for name in named if name is not None}):
        mine = torch.tensor([name == url for name in named])[sample_E]
        host = url.partition("://")[2] or url
        found[f"attest/tokens/{host}"] = float(mine.sum())
        if bool(mine.any()):
            found[f"attest/distance/{host}"] = float(distance_E[mine].mean())
    return found


def _first_crossing(wealth_E: torch.Tensor) -> int | None:
    """After how many tokens the wealth first reached 1 / ALPHA; None if it never did."""
    crossed = (wealth_E >= -math.log(ALPHA)).nonzero()
    return int(crossed[0]) + 1 if len(crossed) else None


def _cap(value: torch.Tensor) -> float:
    """A number that JSON can hold."""
    return min(float(value), MOST)
