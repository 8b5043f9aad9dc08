"""Train a small GPT on the source code of Python's own standard library, with ZeRO under Lightning.

    python examples/lightning_gpt.py               # two ranks on CPU, or every GPU there is
    python examples/lightning_gpt.py --compare     # ... and what Lightning's own DeepSpeed strategy sends for the same
    python examples/lightning_gpt.py --manual --stage 2 --precision bf16-mixed

What to look at: `Manual` is ordinary manual optimization, `main` an ordinary Trainer with `ZeroSyncStrategy`, and the
table at the end shows that the backwards of one optimizer step led to one reduction of the gradients.
"""

import argparse
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import torch
from gpt import GPT, next_byte_loss
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_only
from text import Windows, read_standard_library
from torch.utils.data import DataLoader

from zerosync_strategy import ZeroSyncStrategy
from zerosync_strategy.core.comm.journal import Traffic
from zerosync_strategy.lightning import DeepSpeedAnyDeviceStrategy
from zerosync_strategy.tools.plan.measures import ProcessCounter

BATCH = 4  # pieces of text per rank and backward
VALIDATION = 128  # pieces of text
CLIP = 1.0
PROMPT = b"def "


class Automatic(LightningModule):
    """Automatic optimization: `accumulate_grad_batches` and `gradient_clip_val` of the Trainer do the rest."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.gpt = GPT(options.layers, options.width, options.context)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.gpt(tokens)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = next_byte_loss(self.gpt(batch), batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", next_byte_loss(self.gpt(batch), batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.options.lr)
        warm_up = max(1, min(10, self.options.steps // 4))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Manual(Automatic):
    """The same training by hand: any number of `manual_backward`, then one `step`."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / self.options.accumulate)
        if (batch_idx + 1) % self.options.accumulate == 0:
            optimizer = self.optimizers()
            self.clip_gradients(optimizer, gradient_clip_val=CLIP)
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()


@dataclass
class StepCost:
    """What one optimizer step cost on this rank."""

    backwards: int
    reductions: int
    collectives: Mapping[str, Traffic]

    @property
    def bytes_sent(self) -> int:
        return sum(traffic.bytes for traffic in self.collectives.values())


class Reports(Callback):
    """Keeps ZeroSync's own report of every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[StepCost] = []
        self._seen = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        report = trainer.strategy.zerosync.report
        if report is not None and report.step > self._seen:
            self._seen = report.step
            self.steps.append(StepCost(report.backwards, report.reductions, report.collectives))


class Meter(Callback):
    """Measures the same for any DeepSpeed strategy. A backward that sent gradients is a reduction."""

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate
        self.steps: list[StepCost] = []
        self._counter = ProcessCounter()
        self._step = StepCost(0, 0, {})

    def on_train_start(self, *_: Any) -> None:
        self._counter.start()

    def on_before_backward(self, *_: Any) -> None:
        self._collect()

    def on_after_backward(self, *_: Any) -> None:
        self._step.backwards += 1
        self._step.reductions += any("reduce" in kind for kind in self._collect())

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._collect()
        if (batch_idx + 1) % self.accumulate == 0:
            self.steps.append(self._step)
            self._step = StepCost(0, 0, {})

    def on_train_end(self, *_: Any) -> None:
        self._counter.stop()

    def _collect(self) -> Mapping[str, Traffic]:
        taken, total = self._counter.take(), self._step.collectives
        self._step.collectives = {k: total.get(k, Traffic()) + taken.get(k, Traffic()) for k in {*total, *taken}}
        return taken


class Outcome(Callback):
    """The validation loss before and after training, and text that the trained model writes."""

    def __init__(self, validation: Windows, length: int = 200) -> None:
        self.validation, self.length = validation, length
        self.before = self.after = float("nan")
        self.sample = b""

    @torch.no_grad()
    def setup(self, trainer: Trainer, module: Automatic, stage: str) -> None:
        # In plain torch: DeepSpeed has not taken the model yet. And after a validation before the first backward, stock
        # ZeRO-3 gathers every parameter twice from then on, which would flatter the comparison.
        batches = DataLoader(self.validation, batch_size=BATCH)
        losses = [next_byte_loss(module.gpt(batch), batch).item() for batch in batches]
        self.before = sum(losses) / len(losses)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.after = float(trainer.callback_metrics["val_loss"])
        self.sample = self._generate(trainer, module)

    @torch.no_grad()
    def _generate(self, trainer: Trainer, module: LightningModule) -> bytes:
        # Every rank writes the same text: under stage 3 each forward gathers the parameters from all of them.
        random = torch.Generator().manual_seed(0)
        module.eval()
        text = list(PROMPT)
        for _ in range(self.length):
            tokens = torch.tensor([text[-module.gpt.context :]], device=trainer.strategy.root_device)
            logits = trainer.model(tokens)[0, -1].float().cpu()
            text.append(int(torch.multinomial((logits / 0.8).softmax(-1), 1, generator=random)))
        return bytes(text)


def fit(options: argparse.Namespace, strategy: Strategy, steps: int, callbacks: list[Callback], **extra: Any) -> None:
    """Train a fresh model for `steps` optimizer steps: the same model on the same text at every call."""
    seed_everything(0, verbose=False)
    module = Manual(options) if options.manual else Automatic(options)
    training, validation = texts(options)
    by_trainer = {} if options.manual else dict(accumulate_grad_batches=options.accumulate, gradient_clip_val=CLIP)
    trainer = Trainer(
        strategy=strategy, accelerator=options.accelerator, devices=options.devices, precision=options.precision,
        max_epochs=1, limit_train_batches=steps * options.accumulate, num_sanity_val_steps=0, callbacks=callbacks,
        logger=False, enable_checkpointing=False, enable_model_summary=False, **by_trainer, **extra,
    )  # fmt: skip
    trainer.fit(module, DataLoader(training, batch_size=BATCH), DataLoader(validation, batch_size=BATCH))


def texts(options: argparse.Namespace) -> tuple[Windows, Windows]:
    """What to train on, each piece once, and what to validate on."""
    training, validation = read_standard_library()
    pieces = options.steps * options.accumulate * BATCH * options.devices
    return Windows(training, pieces, options.context), Windows(validation, VALIDATION, options.context)


def typical(steps: list[StepCost]) -> StepCost:
    """The step with the median of the bytes. The first does not count: ZeRO-3 still learns the order of the modules."""
    steps = steps[1:] or steps
    middle = median_low(step.bytes_sent for step in steps)
    return next(step for step in steps if step.bytes_sent == middle)


@rank_zero_only
def print_costs(ours: StepCost, stock: StepCost | None) -> None:
    """One row per quantity, one column per strategy, and how many times as much stock's is.

    gloo, which CPUs use, sends its reduce-scatter as an all-reduce: twice the bytes, and counted so.
    """
    columns = [ours] if stock is None else [ours, stock]

    def row(name: str, *cells: str) -> None:
        print(f"  {name:<32}{''.join(f'{cell:>16}' for cell in cells)}".rstrip())

    def total(name: str, form: str, value: Callable[[StepCost], float]) -> None:
        mine, theirs = value(columns[0]), value(columns[-1])
        ratio = [f"{theirs / mine:.2f}x" if mine else "-"] if stock else []
        row(name, *(f"{value(step):{form}}" for step in columns), *ratio)

    print()
    row("One optimizer step, one rank", *(["ZeroSync", "stock", "ratio"] if stock else ["ZeroSync"]))
    total("backwards", "d", lambda step: step.backwards)
    total("reductions of the gradients", "d", lambda step: step.reductions)
    total("MB sent", ".2f", lambda step: step.bytes_sent / 1e6)
    row("of which, calls and MB:")
    for kind in sorted({kind for step in columns for kind in step.collectives}):
        traffic = [step.collectives.get(kind, Traffic()) for step in columns]
        row(f"  {kind}", *(f"{t.calls:d}  {t.bytes / 1e6:6.2f}" if t.calls else "-" for t in traffic))


@rank_zero_only
def print_outcome(outcome: Outcome) -> None:
    print(f"\nValidation loss, nats per byte: {outcome.before:.3f} before, {outcome.after:.3f} after")
    print(f"\nA sample, from the prompt {PROMPT.decode()!r}:\n{'-' * 60}")
    print(f"{outcome.sample.decode(errors='replace')}\n{'-' * 60}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3, help="ZeRO stage (default: 3)")
    parser.add_argument("--devices", type=int, help="ranks (default: every GPU, or 2 on CPU)")
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed", "bf16-true"), default="32-true")
    parser.add_argument("--manual", action="store_true", help="manual optimization")
    parser.add_argument("--compare", action="store_true", help="run Lightning's own DeepSpeed strategy as well")
    parser.add_argument("--hold", default="0", help="stage 3: param_memory_budget, as '4MB' or 'all' (default: 0)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: 60)")
    parser.add_argument("--accumulate", type=int, default=8, help="backwards per optimizer step (default: 8)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--context", type=int, default=64, help="bytes that the model sees")
    parser.add_argument("--lr", type=float, default=2e-3)
    options = parser.parse_args()
    options.accelerator = options.accelerator or ("cuda" if torch.cuda.is_available() else "cpu")
    options.devices = options.devices or (torch.cuda.device_count() if options.accelerator == "cuda" else 2)
    return options


def be_quiet() -> None:
    """No hints and start-up logs of the libraries below; errors stay, and so do ZeroSync's warnings."""
    warnings.filterwarnings("ignore", module="(lightning|torch|deepspeed)")
    for name in ("lightning.pytorch", "lightning.fabric", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> None:
    options = parse_arguments()
    be_quiet()
    if options.accelerator == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // options.devices))

    held = {"param_memory_budget": options.hold} if options.stage == 3 else {}
    strategy = ZeroSyncStrategy(stage=options.stage, **held)
    reports, outcome = Reports(), Outcome(texts(options)[1])
    fit(options, strategy, options.steps, [reports, outcome])
    print_outcome(outcome)

    stock = None
    if options.compare:
        rank_zero_only(print)("\nThe same with Lightning's own DeepSpeed strategy, a few steps ...")
        meter = Meter(options.accumulate)
        baseline = DeepSpeedAnyDeviceStrategy(stage=options.stage)  # Lightning's own; on CPU too
        fit(options, baseline, min(4, options.steps), [meter], limit_val_batches=0, enable_progress_bar=False)
        stock = typical(meter.steps)
    print_costs(typical(reports.steps), stock)


if __name__ == "__main__":
    main()
