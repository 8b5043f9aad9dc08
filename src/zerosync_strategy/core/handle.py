"""The handle of an attached engine, which :func:`~zerosync_strategy.attach` returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from pathlib import Path

import torch

from zerosync_strategy.core.attached.checkpointing import export_weights, full_weights
from zerosync_strategy.core.attached.engine import AttachedEngine
from zerosync_strategy.core.gradients.window import WindowState
from zerosync_strategy.core.options.budgets import parse_bytes
from zerosync_strategy.core.params.full_parameters import full_parameters, full_state, load_full_state
from zerosync_strategy.core.report import StepReport


class ZeroSync:
    """The handle of one attached engine. Made by :func:`~zerosync_strategy.attach`.

    Attributes:
        engine: the DeepSpeed engine.
        config: the options in force.
        window: the window of the coming optimizer step.
        parameters: those that the optimizer trains.
        may_be_replaced: the program has not asked for it, and its own :func:`attach` is to be the one that holds.
        norm_is_read: is called when the program asks the engine for the norm of its last step.
        losses_divided_by: returns by what the framework that calls ``engine.backward()`` divides each loss.
        counter: counts the collectives for the report, apart from those of other engines in this process.
    """

    def __init__(self, attached: AttachedEngine) -> None:
        self._attached, parts = attached, attached.parts
        self.engine, self.config, self.window = parts.engine, parts.config, parts.window
        self.parameters, self.counter = parts.reducer.params, parts.traffic
        self.may_be_replaced = False
        self.norm_is_read: Callable[[], None] = lambda: None
        self.losses_divided_by: Callable[[], float] = lambda: 1
        self.engine._zerosync = self.engine.optimizer._zerosync = self

    @property
    def _is_attached(self) -> bool:
        return getattr(self.engine, "_zerosync", None) is self  # else detached, destroyed, or another's by now

    def _while_attached(self, call: str) -> AttachedEngine:
        """Return the mechanisms of the engine for ``call``, which would change nothing, or too much, without them.

        Raises:
            RuntimeError: they are detached.
        """
        if not self._is_attached:
            raise RuntimeError(
                f"{call} was called on the handle of an engine that is no longer attached by it: detach() was called,"
                " or the engine was destroyed. Call it before that, or on the handle of another attach()."
            )
        return self._attached

    @property
    def report(self) -> StepReport | None:
        """What the last optimizer step cost, or ``None`` before the first."""
        return self._attached.meter.report

    @property
    def has_backward(self) -> bool:
        """Whether a backward ran since the last optimizer step."""
        return self.window.state is not WindowState.CLOSED

    def reduce(self) -> None:
        """Reduce the window now, so that code between here and ``step()`` sees averaged gradients. Collective."""
        self._while_attached("reduce()").pending.reduce()

    def abort(self, reason: str = "abort() was called") -> None:
        """Drop the gradients of the open window and close it, with a warning and without a collective (W3)."""
        self.window.abort(reason)

    @contextmanager
    def awaiting_backward(self) -> Iterator[None]:
        """Around a backward that another engine runs, and that may reach parameters of this one too.

        Without it, such a backward is one of this engine's window as well; but a graph that runs inside another one
        counts by itself, and an exception leaves the incomplete gradients in the window.
        """
        self._while_attached("awaiting_backward()")
        with self.window.engine_backward(begins=False):
            yield
        self.counter.attribute()

    def gradient_norm(self) -> torch.Tensor:
        """Return the L2 norm of this window's gradients, averaged over the ranks. Reduces the window. Collective.

        Returns:
            A scalar on the engine's device, the same on every rank; infinite if a gradient is not finite, and 0 if no
            backward ran since the last step. The coming step uses it and does not compute it again.
        """
        return self._while_attached("gradient_norm()").pending.gradient_norm()

    def mean_over(self, items: float | torch.Tensor) -> None:
        """Let the coming step be that of the mean over items, as tokens. For the option ``loss_reduction="sum"``.

        Call it before the backward of each loss, on every rank, with the number of items that the loss is a sum over (0
        where it has none): the step's gradient is then the sum of all gradients of the window, of all ranks, divided by
        the number of all items. Exact for batches of any lengths, without a pass over the data to count them. By what
        Lightning, ``accelerator.backward()`` and ``engine.backward()`` divide a loss for accumulation, the gradients
        are multiplied. It sends 8 bytes per step.

        Args:
            items: their number; a tensor of one element may be on the device, and the host does not wait for it.

        Raises:
            ValueError: ``items`` is no number of items, or the option is not set.
            RuntimeError: the gradients are reduced already.
        """
        pending = self._while_attached("mean_over()").pending
        pending.mean_over(items, self.losses_divided_by() * self.engine.gradient_accumulation_steps())

    @contextmanager
    def full_gradients(self) -> Iterator[None]:
        """Around code that looks at averaged gradients, or changes them: each parameter has its own in ``param.grad``.

        Reduces the window, and gathers the gradients from all ranks' shards. They are in full, in the parameter's
        dtype, and without the fp16 loss scale; zeros where no rank has one. The coming step uses what the code leaves
        there, and a gradient of zero where it leaves none; change them alike on all ranks. ``clip_next_step()`` clips
        them at once in here, and before where it was called before. Without a backward since the last step, there are
        none. Collective.
        """
        with self._while_attached("full_gradients()").pending.full_gradients():
            yield

    @contextmanager
    def local_gradients(self) -> Iterator[None]:
        """Around code that looks at this rank's own gradients between two backwards, or changes them.

        Nothing is sent. They are in ``param.grad`` where :attr:`keeps_gradients`. Without this context, ZeRO-3 has
        parameters of no shape, for which torch takes no new gradient.
        """
        with self._while_attached("local_gradients()").pending.local_gradients():
            yield

    @property
    def keeps_gradients(self) -> bool:
        """Whether a backward leaves this rank's gradients in ``param.grad``, unless it is promised to be the last.

        Not with ``coalesce=False``, a ``grad_memory_budget`` that they exceed, or accumulation in another dtype.
        """
        return self._attached.parts.reducer.keeps_gradients

    def clip_next_step(self, max_norm: float) -> None:
        """Clip the coming optimizer step, and only it, to this global gradient norm; 0 leaves it unclipped.

        Raises:
            ValueError: ``max_norm`` is negative or not a number.
            RuntimeError: the engine is detached, as everywhere here.
        """
        if not (isinstance(max_norm, (Real, torch.Tensor)) and max_norm >= 0):
            raise ValueError(f"clip_next_step() takes a norm of 0 or more, got max_norm={max_norm!r}.")
        self._while_attached("clip_next_step()").pending.clip(float(max_norm))

    @property
    def clips_next_step(self) -> bool:
        """Whether :meth:`clip_next_step` was called for the coming step."""
        return self._attached.pending.is_clipped

    @contextmanager
    def full_parameters(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> Iterator[None]:
        """Read and write parameters in full, on any stage: target networks, moving averages, clamps. Collective.

        Inside, each parameter has its values, and what is written to it, alike on all ranks, stays: the coming step
        starts from it. On stages 1 and 2 that holds outside too, and nothing is sent; on stage 3 the parameters are
        gathered, and sharded again with the values of the first rank that shards each.

        Args:
            parameters: which; by default all of the engine's module.
        """
        attached = self._while_attached("full_parameters()")
        apart = attached.parts.traffic.apart("full parameters")
        with apart, attached.activity("full_parameters()"), full_parameters(self.engine, parameters):
            yield

    @contextmanager
    def gathered_for_inference(self) -> Iterator[None]:
        """Run forwards without backwards, as to evaluate or to generate, with all parameters gathered. Collective.

        ZeRO-3 gathers each module's parameters for each forward: for each token that is generated. Inside of this, all
        are gathered once, in buckets, and no module communicates: ranks may make any number of forwards, of any
        modules. At the end, what is not held until the step is released. A window that is open stays so, and training
        goes on as without it. On stages 1 and 2 nothing has to be gathered.

        Raises:
            RuntimeError: inside, from a backward or a step.
        """
        with self._while_attached("gathered_for_inference()").gathered_for_inference():
            yield

    def full_weights(
        self, module: torch.nn.Module | None = None, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full weights by name, as an inference engine takes them, in little memory. Collective on stage 3.

        ZeRO-3 gathers them bucket by bucket (of DeepSpeed's ``stage3_prefetch_bucket_size``, off NCCL of 16 MiB at
        most) and keeps them no longer than the consumer does: beyond what the engine has, about two buckets are in
        memory, or twice the largest parameter. They are there on every rank. All ranks must take them all, or stop at
        the same tensor; a rank that only takes part writes ``for _ in zerosync.full_weights(): pass``. One that stops
        alone lets the others end with a :class:`RankError`. Nothing of the engine changes, in mid-window too. Under
        :func:`~zerosync_strategy.shard_over`, each rank has the parameters of its own groups.

        Args:
            module: the engine's or one in it, whose names they then have; by default the engine's. Alike on all ranks.
            dtype: for floating-point tensors; by default their own, that of training.

        Yields:
            Name and tensor of each entry of ``module.state_dict()``, buffers included, a tied one under each of its
            names in succession; in the order in which they are gathered. Each is a copy on the engine's device, without
            a gradient, for the caller to keep or to change.

        Raises:
            ValueError: ``module`` is none of the engine's, ``dtype`` is no floating-point one, or an entry of the
                ``state_dict()`` is no tensor.
            RuntimeError: in an iteration, after an optimizer step or a loaded checkpoint since its first tensor.
        """
        return iter(full_weights(self._while_attached("full_weights()"), module, dtype))

    def export(
        self,
        directory: str | os.PathLike[str],
        module: torch.nn.Module | None = None,
        *,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str = "5GB",
    ) -> None:
        """Write the full weights to safetensors files, as ``from_pretrained`` and inference engines load them.

        Rank 0 writes, in the memory that :meth:`full_weights` takes. ``model.safetensors``, or files of
        ``max_shard_size`` with ``model.safetensors.index.json``; for a model of transformers, ``config.json`` too. They
        have these names once all are complete, and replace those of an earlier export. A tied tensor is written once,
        under its first name. Collective.

        Args:
            directory: for the files.
            module: as for :meth:`full_weights`. Alike on all ranks.
            dtype: as for :meth:`full_weights`. Alike on all ranks.
            max_shard_size: bytes of the tensors of one file, or a size such as ``"2GiB"``. A larger tensor has its own.

        Raises:
            CheckpointError: on every rank, if rank 0 could not write.
            ValueError: as :meth:`full_weights`; safetensors has no such dtype; or groups of ranks have different
                parameters under one name (:func:`~zerosync_strategy.shard_over`).
        """
        max_shard_bytes = parse_bytes("max_shard_size", max_shard_size)
        export_weights(self._while_attached("export()"), Path(directory), module, dtype, max_shard_bytes)

    def full_state(self) -> dict[str, torch.Tensor]:
        """Return this rank's share of stage 3's parameters in full, on the CPU. Collective.

        Returns:
            By name, those parameters of which this is the first of the ranks that shard them: without
            :func:`~zerosync_strategy.shard_over`, all on rank 0 and none elsewhere.

        Raises:
            ValueError: the engine is not of stage 3.
        """
        self._while_attached("full_state()")
        return full_state(self.engine)

    def load_full_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set stage 3's parameters to what :meth:`full_state` gave this rank. Collective.

        Raises:
            ValueError: on every rank, if a parameter is missing or has another shape on some rank.
        """
        self._while_attached("load_full_state()")
        self.abort("load_full_state() was called")
        load_full_state(self.engine, state)

    def detach(self) -> None:
        """Give the engine back as it was.

        Raises:
            RuntimeError: a window is open; its gradients would be lost silently.
        """
        if not self._is_attached:
            return
        if self.has_backward:
            raise RuntimeError(
                f"detach() found a window with {self.window.backwards} backward(s) since the last optimizer step."
                " Call engine.step() to use their gradients or abort() to drop them first."
            )
        self._attached.detach()

    def end(self) -> None:
        """The engine is used no more: as :meth:`detach`, but an open window is dropped, and nothing is sent.

        The optimizer's shards are not in DeepSpeed's own order then. ``engine.destroy()`` does the same.
        """
        if self._is_attached:
            self._attached.destroyed()
