"""The loop: batches in, steps of the optimiser, and what has to happen between them.

    step      micro-batches -> gradients -> summed over processes -> clipped -> optimiser -> the learner's own rule
    after it  metrics; every so often evaluation, samples, a checkpoint

A step's arithmetic depends on the recipe, the data, and the state that checkpoints hold, on nothing else: no clock, no
global random generator. That is why a run that is killed and resumed ends in the same bits (on a CPU, with the same
number of threads and processes).
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rorqual.errors import ConfigError
from rorqual.training.batch import IGNORE, Packed, micro_batches
from rorqual.training.distributed import Processes
from rorqual.training.interrupt import Interrupt
from rorqual.training.learner import Learner, Phase, Totals
from rorqual.training.metrics import METRICS, Log, MetricsLog, Record, Sink, add_up, imbalance, peak_bytes
from rorqual.training.optim.clip import GradientNorm, by_loss, clip_gradients
from rorqual.training.optim.schedule import factor
from rorqual.training.precision import reduced_products
from rorqual.training.progress import Reporter
from rorqual.training.recipe import Recipe
from rorqual.training.samples import SAMPLES, SampleParams, texts
from rorqual.training.state import State, checkpoints, copy_into, recipe_document, save

CHECKPOINTS = "checkpoints"


class Data(Protocol):
    """What the trainer reads; `rorqual.training.data.TrainingData` is one."""

    tokenizer: Any

    @property
    def fingerprint(self) -> str:
        """Of everything that decides the batches."""

    def batch(self, step: int, rank: int, world: int) -> Sequence[Packed]:
        """This process's share of a step's sequences; steps are counted from 0."""

    def heldout_batches(self, seq_len: int, limit: int) -> Sequence[Packed]:
        """At most `limit` held-out sequences, the same ones at every call; none where nothing is held out."""


class Optimiser(Protocol):
    """What changes the parameters."""

    def step(self, factor: float) -> None:
        """Apply the gradients at `factor` times the recipe's rates."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Nested containers of tensors and plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a run ended: finished steps of `steps`, by what signal it was stopped (0: it was not), the last records."""

    step: int
    steps: int
    signal: int
    last: Record
    evaluation: Record | None


class Trainer:
    """One run in one folder. Build it, `restore` a checkpoint or not, then `run`."""

    def __init__(
        self,
        recipe: Recipe,
        data: Data,
        learner: Learner,
        out: Path,
        *,
        optimiser: Optimiser,
        processes: Processes | None = None,
        reporter: Reporter | None = None,
        samples: SampleParams | None = None,
        stop_id: int | None = None,
    ) -> None:
        """stop_id: the token that ends a sample. Metrics go to `sinks` too, which is empty at first."""
        self.recipe, self.data, self.learner, self.out = recipe, data, learner, out
        self.optimiser = optimiser
        self.processes = processes or Processes()
        self.reporter = reporter or Reporter(silent=not self.processes.first)
        self.steps_done = 0
        self.tokens = 0
        self._began_s = time.monotonic()
        self.sinks: list[Sink] = []
        self._samples = samples or SampleParams()
        self._stop_id = stop_id
        self._log_sizes: dict[str, int] = {METRICS: 0, SAMPLES: 0}
        self._parameters = list(learner.parameters.values())
        self._parts = by_loss(learner.parameters)
        self._device = self._parameters[0].device
        self._heldout: dict[int, Sequence[Packed]] = {}

    def restore(self, state: State) -> None:
        """Stand where the checkpoint stood.

        Raises:
            InputError: the model's parameters are not those of the checkpoint.
        """
        copy_into(self.learner.parameters, state.parameters)
        self.optimiser.load_state_dict(state.optimiser)
        self.steps_done, self.tokens = state.step, state.tokens
        self._began_s = time.monotonic() - state.seconds
        self._log_sizes = dict(state.logs)

    def run(self) -> Ended:
        """Train to the recipe's last step, or until a signal; the folder then holds a checkpoint of where it stands.

        Raises:
            ConfigError: a loss or gradient that is not finite; the last checkpoint is the one before it.
            KeyboardInterrupt: the second Ctrl-C.
        """
        self.processes.share(self._parameters)
        steps, every = self.recipe.run.steps, self.recipe.run
        last: Record = {}
        evaluation: Record | None = None
        stopped = 0
        evaluated = every.eval_every and self._heldout_sequences(self.recipe.seq_len_at(0))
        with Interrupt(self.reporter.note) as interrupt, _Logs(self) as logs:
            self.reporter.begin(self.steps_done, steps)
            try:
                while self.steps_done < steps and not stopped:
                    last = self._step()
                    logs.record(last)
                    self.reporter.step(last)
                    end = self.steps_done == steps
                    if evaluated and (end or _due(self.steps_done, every.eval_every)):
                        evaluation = self.evaluate()
                        logs.record(evaluation)
                        self.reporter.evaluation(evaluation)
                    if every.sample_every and (end or _due(self.steps_done, every.sample_every)):
                        logs.sample(self.steps_done, self.sample())
                    # Agreed upon: a signal may have reached one process only, and all must take the same steps.
                    stopped = max(self.processes.gather(interrupt.signal))
                    if end or stopped or _due(self.steps_done, every.save_every):
                        self._save(logs)
            finally:
                self.reporter.close()
        return Ended(step=self.steps_done, steps=steps, signal=stopped, last=last, evaluation=evaluation)

    @property
    def seconds(self) -> float:
        """Wall time of the run up to now, evaluations included, pauses between a checkpoint and its resume left out."""
        return time.monotonic() - self._began_s

    def _step(self) -> Record:
        """One step of the optimiser, and what it measured."""
        start_s = time.monotonic()
        step = self.steps_done
        batch = self.data.batch(step, self.processes.rank, self.processes.world)
        self.optimiser.zero_grad()
        parts, loads, total, tokens = self._gradients(batch, step)
        norms = {part: clip_gradients(some, self.recipe.optim.clip) for part, some in self._parts.items()}
        if not (math.isfinite(total) and all(norm.finite for norm in norms.values())):
            raise ConfigError(self._not_finite(step, total, norms.values()))
        rate = factor(step, self.recipe.run.steps, self.recipe.optim)
        self.optimiser.step(rate)
        self.learner.after_step(loads)
        self.steps_done += 1
        self.tokens += tokens
        return {
            "kind": "step",
            "step": self.steps_done,
            "tokens": self.tokens,
            **parts,
            "total": total,
            **{"grad_norm" + ("" if part == "backbone" else f"_{part}"): norm.value for part, norm in norms.items()},
            "lr": self.recipe.optim.lr * rate,
            "seq_len": self.recipe.seq_len_at(step),
            "imbalance": imbalance(loads),
            "tokens_per_s": tokens / (time.monotonic() - start_s),
            "seconds": self.seconds,
            "peak_bytes": peak_bytes(self._device),
        }

    def _gradients(self, batch: Sequence[Packed], step: int) -> tuple[dict[str, float], dict[str, Tensor], float, int]:
        """Gradients of the whole step in every process; loss parts, expert loads, total loss and tokens likewise."""
        counts = (sum(sequence.trained for sequence in batch), len(batch), sum(len(sequence.ids) for sequence in batch))
        trained, sequences, tokens = (sum(column) for column in zip(*self.processes.gather(counts), strict=True))
        totals = Totals(tokens=max(1, trained), sequences=max(1, sequences))
        phase = self.recipe.phase_at(step)
        parts: dict[str, float] = {}
        loads: dict[str, Tensor] = {}
        total = 0.0
        for micro in micro_batches(batch, self.recipe.data.micro_tokens):
            with reduced_products(self._device, self.recipe.run.autocast):
                loss = self.learner.loss(self._moved(micro), phase, totals)
                loss.total.backward()
            total += float(loss.total.detach())
            add_up(parts, loss.parts)
            add_up(loads, {name: load.detach().cpu() for name, load in loss.loads.items()})
        self.processes.sum_gradients(self._parameters)
        everything: dict[str, Any] = {}
        mine: dict[str, Any] = {"total": total, "parts": parts, "loads": loads}
        for theirs in self.processes.gather(mine):
            everything["total"] = everything.get("total", 0.0) + theirs["total"]
            for name in ("parts", "loads"):
                add_up(everything.setdefault(name, {}), theirs[name])
        return everything["parts"], everything["loads"], everything["total"], tokens

    def evaluate(self) -> Record:
        """Next-token loss on held-out sequences, in what is on at this point of the run, without simulated seams.

        As many tokens whatever the sequences' length; zeros where nothing is held out. `bits_per_character` divides by
        the characters of the targets' text: special tokens cost bits and have no characters.
        """
        seq_len, phase = self._present()
        nats, count, characters = 0.0, 0, 0
        share = self._heldout_sequences(seq_len)[self.processes.rank :: self.processes.world]
        for micro in micro_batches(share, self.recipe.data.micro_tokens):
            with torch.no_grad(), reduced_products(self._device, self.recipe.run.autocast):
                losses = self.learner.token_losses(self._moved(micro), phase)
            for sequence, loss in zip(micro, losses, strict=True):
                targets = sequence.targets[sequence.targets != IGNORE].tolist()
                nats += float(loss.double().sum())
                count += len(targets)
                characters += len(self.data.tokenizer.decode(targets))
        nats, count, characters = map(sum, zip(*self.processes.gather((nats, count, characters)), strict=True))
        return {
            "kind": "eval",
            "step": self.steps_done,
            "tokens": self.tokens,
            "loss": nats / max(1, count),
            "bits_per_character": nats / math.log(2) / max(1, characters),
            "eval_tokens": count,
            "seq_len": seq_len,
        }

    def sample(self) -> list[str]:
        """How the model goes on from held-out beginnings; none in processes above the first."""
        if not self.processes.first:
            return []
        seq_len, phase = self._present()
        moved = self._moved(self._heldout_sequences(seq_len))
        seed = self.recipe.run.seed * 1_000_003 + self.steps_done
        with torch.no_grad():
            return list(texts(self.learner, phase, self.data.tokenizer, moved, self._stop_id, self._samples, seed))

    def _present(self) -> tuple[int, Phase]:
        """Sequence length and phase of the last step that was taken, without simulated seams."""
        step = max(0, self.steps_done - 1)
        return self.recipe.seq_len_at(step), dataclasses.replace(self.recipe.phase_at(step), replay=0.0)

    def _heldout_sequences(self, seq_len: int) -> Sequence[Packed]:
        if seq_len not in self._heldout:
            limit = max(1, self.recipe.run.eval_sequences * self.recipe.data.seq_len // seq_len)
            self._heldout = {seq_len: self.data.heldout_batches(seq_len, limit)}
        return self._heldout[seq_len]

    def _save(self, logs: _Logs) -> None:
        self.processes.barrier()
        if self.processes.first:
            state = State(
                step=self.steps_done,
                tokens=self.tokens,
                seconds=self.seconds,
                processes=self.processes.world,
                logs=logs.sync(),
                recipe=recipe_document(self.recipe),
                fingerprint=self.data.fingerprint,
                parameters=dict(self.learner.parameters),
                optimiser=self.optimiser.state_dict(),
            )
            save(self.out / CHECKPOINTS, state, self.data.tokenizer.to_str(), self.recipe.run.keep)
        self.processes.barrier()

    def _moved(self, batch: Sequence[Packed]) -> Sequence[Packed]:
        if self._device.type == "cpu":
            return batch
        return [dataclasses.replace(p, ids=p.ids.to(self._device), targets=p.targets.to(self._device)) for p in batch]

    def _not_finite(self, step: int, total: float, norms: Iterable[GradientNorm]) -> str:
        broken = next((norm.broken for norm in norms if norm.broken), "")
        what = f"the gradient of {broken} is not finite" if math.isfinite(total) else f"the loss is {total}"
        kept = checkpoints(self.out / CHECKPOINTS)
        where = f"the last good checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"
        return f"optim: {what} at step {step + 1}; {where}; try a lower lr, lr_adam, lr_table or clip"


class _Logs:
    """The files of a run that grow, open in the first process only."""

    def __init__(self, trainer: Trainer) -> None:
        self._files: dict[str, Log] = {}
        self._sinks = trainer.sinks
        if trainer.processes.first:
            kinds: dict[str, Callable[[Path, int], Log]] = {METRICS: MetricsLog, SAMPLES: Log}
            self._files = {name: kind(trainer.out / name, trainer._log_sizes[name]) for name, kind in kinds.items()}

    def __enter__(self) -> _Logs:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        for sink in self._sinks:
            sink.close()

    def record(self, record: Record) -> None:
        """To all that take metrics."""
        for sink in self._takers():
            sink(record)

    def sample(self, step: int, samples: Sequence[str]) -> None:
        """Under a heading."""
        if SAMPLES in self._files:
            self._files[SAMPLES].write("".join((f"== step {step}\n", *(f"{text}\n\n" for text in samples))))

    def sync(self) -> dict[str, int]:
        """To the disk; the size of each."""
        for file in self._files.values():
            file.sync()
        return {name: file.size for name, file in self._files.items()}

    def _takers(self) -> Iterator[Sink]:
        metrics = self._files.get(METRICS)
        if isinstance(metrics, MetricsLog):
            yield metrics
            yield from self._sinks


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
