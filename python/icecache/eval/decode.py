"""An exact prefill shared by all policies, and decoding after it through one of them."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, cast

import torch
from rich.progress import Progress
from transformers import DynamicCache

from icecache.cache import IceCache
from icecache.eval.errors import EvalError
from icecache.eval.probe import Probe
from icecache.eval.runs import Run
from icecache.eval.traffic import Traffic
from icecache.policies import DenseLayer, LayerLike, Prompt

_PREFILL_CHUNK = 512


@dataclass(frozen=True)
class Prefill:
    """Keys and values of a context, per layer `[kv_heads, length, head_dim]`."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    length: int
    prompts: list[Prompt] | None = None
    """The same with queries, for policies that observe them."""


def check_model(model: Any, positions: int) -> None:
    """Refuses a model that is not all full attention, or that is too short for `positions`."""
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None):
        raise EvalError("only models whose every layer has full attention can be evaluated")
    limit = getattr(config, "max_position_embeddings", positions)
    if positions > limit:
        raise EvalError(f"{positions} positions are needed, the model has {limit}")


@torch.inference_mode()
def prefill(model: Any, ids: Sequence[int], progress: Progress) -> Prefill:
    """Reads all of `ids` with full attention, in chunks."""
    cache = DynamicCache()
    task = progress.add_task(f"reading {len(ids)} tokens", total=len(ids))
    for start in range(0, len(ids), _PREFILL_CHUNK):
        chunk = ids[start : start + _PREFILL_CHUNK]
        forward(model, chunk, start, cache)
        progress.advance(task, len(chunk))
    progress.remove_task(task)
    layers: list[Any] = cache.layers
    return Prefill([(layer.keys[0], layer.values[0]) for layer in layers], len(ids))


@dataclass(frozen=True)
class Step:
    """What one decoded position gave and cost; the means are over layers and KV heads."""

    log_probs: torch.Tensor
    """`[vocabulary]`, f32: the next token's distribution."""
    ms: float
    tokens_exact: float
    key_share: float
    """Key rows read (node rows are rows), as a share of the stored ones."""
    value_share: float
    true_mass: float | None
    """Share of the full softmax on the tokens attended exactly; None if it was not measured."""

    @property
    def top(self) -> int:
        """The most probable next token."""
        return int(self.log_probs.argmax())


@dataclass(frozen=True)
class Cost:
    """What the last position took, all layers together; terms as in `comparison.TextRow`."""

    exact_tokens: float
    read_bytes: float
    moved_bytes: float
    held_bytes: float


class Decoder:
    """Decodes after a prefill with the layers of one run.

    The first step also stores the prefill in the layers, which builds their indexes. `options`
    override those of the run; `wrap` may replace each layer by another one around it.
    """

    def __init__(
        self,
        model: Any,
        context: Prefill,
        run: Run,
        *,
        wrap: Callable[[Any], Any] = lambda layer: layer,
        **options: Any,
    ) -> None:
        self.run = run
        self.seq_len = context.length
        self._model = model
        self._probes: list[Probe] = []
        self._traffic: list[Traffic] = []
        config = run.config(**options)
        factory = run.factory(**options)

        def filled(
            *,
            num_q_heads: int,
            num_kv_heads: int,
            head_dim: int,
            scale: float | None,
            layer_index: int,
            device: torch.device,
        ) -> Any:
            layer: LayerLike = factory(
                num_q_heads=num_q_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                scale=scale,
                layer_index=layer_index,
            )
            layer.prefill(*context.layers[layer_index])
            if isinstance(layer, DenseLayer) and context.prompts is not None:
                layer.observe(context.prompts[layer_index])
            self._traffic.append(Traffic(run.policy, layer, num_q_heads, head_dim))
            self._probes.append(Probe(wrap(layer), num_q_heads, scale, armed=self._watching))
            return self._probes[-1]

        self._watching = False
        self._cache = IceCache(model, config=config, layer_factory=filled)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int], *, watch: bool = False) -> torch.Tensor:
        """Feeds tokens in one forward, each of which chooses for itself what it attends to.

        Returns log-probabilities of the next tokens, f32 `[len(tokens), vocabulary]`. With `watch`
        the heads are compared with full attention at the last position (`heads`).
        """
        self._watching = watch
        for probe in self._probes:
            probe.armed = watch
        logits = forward(self._model, tokens, self.seq_len, self._cache, len(tokens))
        self.seq_len += len(tokens)
        return torch.log_softmax(logits.float(), dim=-1)

    def step(self, token: int, *, measure_mass: bool = False) -> Step:
        """Feeds one token. Measuring the true mass reads every key, so `ms` means little then."""
        started = time.perf_counter()
        log_probs = self.read([token], watch=measure_mass)[0]
        elapsed = time.perf_counter() - started
        stats = [probe.stats() for probe in self._probes]
        return Step(
            log_probs=log_probs,
            ms=1e3 * elapsed,
            tokens_exact=fmean(s.tokens_exact for s in stats),
            key_share=fmean(s.key_rows_read / s.seq_len for s in stats),
            value_share=fmean(s.value_rows_read / s.seq_len for s in stats),
            true_mass=fmean(p.mass.mean() for p in self._probes) if measure_mass else None,
        )

    def cost(self) -> Cost:
        """Of the last position. What it moved is told from what the positions fed since the last
        call left on the device: call it after each of some positions that are fed one by one."""
        stats = [probe.stats() for probe in self._probes]
        moved, held = 0.0, 0.0
        for traffic, probe, one in zip(self._traffic, self._probes, stats, strict=True):
            layer_moved, layer_held = traffic.step(probe.selected(), one)
            moved += layer_moved
            held += layer_held
        return Cost(
            exact_tokens=fmean(s.tokens_exact for s in stats),
            # A row of keys or values of all heads is this many bytes.
            read_bytes=sum(
                (s.key_rows_read + s.value_rows_read) * s.kv_bytes / (2 * s.seq_len) for s in stats
            ),
            moved_bytes=moved,
            held_bytes=held,
        )

    def heads(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer, of the last position of a watched `read`: `mass` and `error` of each KV head,
        `[kv_heads]`; terms as in `comparison.HeadRow`."""
        return [(probe.mass, probe.error) for probe in self._probes]

    def crop(self, tokens: int) -> None:
        """Takes back the last `tokens` positions."""
        self._cache.crop(-tokens)
        self.seq_len -= tokens

    def memory(self) -> tuple[int, int]:
        """Bytes of the raw keys and values of all layers, and every byte stored beyond them."""
        stats = [probe.stats() for probe in self._probes]
        return sum(s.kv_bytes for s in stats), sum(s.index_bytes for s in stats)


def forward(
    model: Any, ids: Sequence[int], position: int, cache: Any, last: int = 1
) -> torch.Tensor:
    """Feeds `ids`, the first of them at `position`; logits of the `last`, `[last, vocabulary]`."""
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    # Positions are given because the cache of a `Decoder` is filled only when it is first used.
    positions = torch.arange(position, position + len(ids))[None]
    output = model(
        torch.tensor([list(ids)]),
        position_ids=positions,
        use_cache=True,
        logits_to_keep=last,
        **{name: cache},
    )
    return cast(torch.Tensor, output.logits[0])
