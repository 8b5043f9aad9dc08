"""The handle of an attached engine, which :func:`~zerosync_strategy.attach` returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from pathlib import Path

import torch

from zerosync_strategy.core.attached.engine import AttachedEngine
from zerosync_strategy.core.attached.full_weights import FullWeights, export_weights, full_state, load_full_state
from zerosync_strategy.core.checkpoints.background import wait_for_save
from zerosync_strategy.core.gradients.window import WindowState
from zerosync_strategy.core.options import parse_bytes
from zerosync_strategy.core.params.module_parameters import full_parameters
from zerosync_strategy.core.report import StepReport


class ZeroSync:
    """The handle of one attached engine. Made by :func:`~zerosync_strategy.attach`.

    Attributes:
        engine: the DeepSpeed engine.
        config: the options in force.
        window: the window of the next optimizer step.
        parameters: the parameters that the optimizer trains.
        may_be_replaced: the program did not attach explicitly, and its own :func:`attach` may replace this handle.
        coming_norm: returns what ``engine.get_global_grad_norm()`` shall return of a step that is to come, or ``None``:
            the norm of the last step.
        losses_divided_by: returns the divisor that the framework applies to each loss before ``engine.backward()``.
        counter: counts the collectives of this engine, for the report.
    """

    def __init__(self, attached: AttachedEngine) -> None:
        self._attached, parts = attached, attached.parts
        self.engine, self.config, self.window = parts.engine, parts.config, parts.window
        self.parameters, self.counter = parts.reducer.params, parts.counter
        self.may_be_replaced = False
        self.coming_norm: Callable[[], torch.Tensor | None] = lambda: None
        self.losses_divided_by: Callable[[], float] = lambda: 1
        self.engine._zerosync = self.engine.optimizer._zerosync = self

    @property
    def _is_attached(self) -> bool:
        return getattr(self.engine, "_zerosync", None) is self  # else detached, destroyed, or attached anew

    def _while_attached(self, call: str) -> AttachedEngine:
        """Return the attached engine, for ``call``; a ``RuntimeError`` if it is detached."""
        if not self._is_attached:
            raise RuntimeError(
                f"{call} was called on the handle of an engine that is no longer attached by it: detach() was called,"
                " or the engine was destroyed. Call it before that, or on the handle of another attach()."
            )
        return self._attached

    @property
    def report(self) -> StepReport | None:
        """The report of the last optimizer step, or ``None`` before the first."""
        return self._attached.meter.report

    @property
    def has_backward(self) -> bool:
        """Whether a backward ran since the last optimizer step."""
        return self.window.state is not WindowState.CLOSED

    def reduce(self) -> None:
        """Reduce the window now, so that code from here to ``step()`` can use averaged gradients. Collective."""
        self._while_attached("reduce()").stage.pending.reduce()

    def abort(self, reason: str = "abort() was called") -> None:
        """Drop the gradients of the open window and close it, with a warning and without a collective (W3)."""
        self.window.abort(reason)

    @contextmanager
    def awaiting_backward(self) -> Iterator[None]:
        """Wrap a backward of another engine that may also reach parameters of this engine.

        Without this context, the backward also belongs to this engine's window. But then a nested autograd graph counts
        as a backward by itself, and an exception leaves incomplete gradients in the window.
        """
        self._while_attached("awaiting_backward()")
        with self.window.engine_backward(begins=False):
            yield

    def gradient_norm(self) -> torch.Tensor:
        """Return the L2 norm of this window's averaged gradients. Reduces the window. Collective.

        Returns:
            A scalar on the engine's device, the same on every rank; infinite if a gradient is not finite, and 0 if no
            backward ran since the last step. The next step uses this norm and does not compute it again.
        """
        return self._while_attached("gradient_norm()").stage.pending.gradient_norm()

    def mean_over(self, items: float | torch.Tensor) -> None:
        """Make the next step that of the mean over items, as tokens. For the option ``loss_reduction="sum"``.

        Call it before the backward of each loss, on every rank, with the number of items over which the loss is a sum
        (0 if there is none). The step's gradient is then the sum of all gradients of the window and of all ranks,
        divided by the number of all items. It is exact for batches of any lengths, without a pass over the data to
        count them. If Lightning, ``accelerator.backward()`` or ``engine.backward()`` divides a loss for accumulation,
        this is undone. It sends 8 bytes per step.

        Args:
            items: their number, or a tensor of one element on any device, for which the host does not wait.

        Raises:
            ValueError: ``items`` is no number of items, or the option is not set.
            RuntimeError: the gradients are reduced already.
        """
        pending = self._while_attached("mean_over()").stage.pending
        pending.mean_over(items, self.losses_divided_by() * self.engine.gradient_accumulation_steps())

    @contextmanager
    def full_gradients(self) -> Iterator[None]:
        """Wrap code that reads or changes averaged gradients, in ``param.grad`` of each parameter. Collective.

        Reduces the window, and gathers the gradients from all ranks' shards. They are in full, in the parameter's
        dtype, and without the fp16 loss scale; zeros if no rank has a gradient. Changes must be the same on all ranks.
        The next step uses the gradients that the code leaves in ``param.grad``, and zeros for ``None``. Inside,
        ``clip_next_step()`` clips these gradients immediately; if it was called before, they are clipped on entry.
        Without a backward since the last step, there are no gradients.
        """
        with self._while_attached("full_gradients()").stage.pending.full_gradients():
            yield

    @contextmanager
    def local_gradients(self) -> Iterator[None]:
        """Wrap code that reads or changes this rank's own gradients between two backwards. Sends nothing.

        They are in ``param.grad`` if :attr:`keeps_gradients`. Outside of this context, ZeRO-3's parameters have an
        empty shape, so torch refuses an assignment to ``param.grad``.

        Raises:
            RuntimeError: they are reduced already, by a backward that was taken for the last of its window.
        """
        with self._while_attached("local_gradients()").stage.pending.local_gradients():
            yield

    @property
    def keeps_gradients(self) -> bool:
        """Whether a backward leaves this rank's gradients in ``param.grad``, unless taken for the window's last.

        ``False`` with ``coalesce=False``, a ``grad_memory_budget`` that they exceed, or accumulation in another dtype.
        """
        return self._attached.parts.reducer.keeps_gradients

    def clip_next_step(self, max_norm: float) -> None:
        """Clip the gradients of the next optimizer step only to this global norm; 0 leaves them unclipped.

        Raises:
            ValueError: ``max_norm`` is negative or not a number.
            RuntimeError: the engine is detached (other methods raise this, too).
        """
        if not (isinstance(max_norm, (Real, torch.Tensor)) and max_norm >= 0):
            raise ValueError(f"clip_next_step() takes a norm of 0 or more, got max_norm={max_norm!r}.")
        self._while_attached("clip_next_step()").stage.pending.clip(float(max_norm))

    @property
    def clips_next_step(self) -> bool:
        """Whether :meth:`clip_next_step` was called for the next step."""
        return self._attached.stage.pending.is_clipped

    @contextmanager
    def full_parameters(self, parameters: Iterable[torch.nn.Parameter] | None = None) -> Iterator[None]:
        """Read and write parameters in full, on any stage: target networks, moving averages, clamps. Collective.

        Inside, each parameter has its full values. Values that are written, the same on all ranks, persist: the next
        step starts from them. On stages 1 and 2 this also holds outside of the context, and nothing is sent. On stage 3
        the parameters are gathered, and at the end sharded again, with the values of the first rank that shards each.

        Args:
            parameters: the parameters; by default all of the engine's module.
        """
        attached = self._while_attached("full_parameters()")
        call, apart = attached.activity("full_parameters()"), attached.apart("full parameters")
        with apart, call, full_parameters(self.engine, parameters):
            yield

    @contextmanager
    def gathered_for_inference(self) -> Iterator[None]:
        """Run forwards without backwards, as to evaluate or to generate, with all parameters gathered. Collective.

        ZeRO-3 gathers each module's parameters for each forward, that is, for each generated token. In this context,
        all are gathered once, in buckets, and no module communicates. So ranks may run any number of forwards of any
        modules. At the end, parameters that are not held until the step are released. An open window stays open, and
        training is not affected. On stages 1 and 2 nothing needs to be gathered.

        Raises:
            RuntimeError: a backward or a step is called inside.
        """
        with self._while_attached("gathered_for_inference()").gathered_for_inference():
            yield

    def full_weights(
        self, module: torch.nn.Module | None = None, *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full weights by name, as an inference engine takes them, in little memory. Collective on stage 3.

        ZeRO-3 gathers them bucket by bucket (of DeepSpeed's ``stage3_prefetch_bucket_size``; off NCCL, of at most 16
        MiB). They are freed as soon as the consumer drops them: about two buckets, or twice the largest parameter, are
        in memory in addition to the engine. Every rank gets all weights. All ranks must iterate to the end, or stop at
        the same tensor; a rank that only takes part writes ``for _ in zerosync.full_weights(): pass``. If one rank
        stops alone, the others end with a :class:`RankError`. The engine does not change, also in mid-window. Under
        :func:`~zerosync_strategy.shard_over`, each rank gets the parameters of its own groups.

        Args:
            module: the engine's module, the default, or a module in it, to which names are then relative. The same on
                all ranks.
            dtype: for floating-point tensors; by default their own, that of training.

        Yields:
            Name and tensor of each entry of ``module.state_dict()``, buffers included, in the order of the gathers. A
            tied tensor is yielded under each of its names in succession. Each tensor is a copy on the engine's device,
            without a gradient, which the caller may keep or change.

        Raises:
            ValueError: ``module`` is not in the engine's module, ``dtype`` is not a floating-point dtype, or an entry
                of the ``state_dict()`` is not a tensor.
            RuntimeError: an optimizer step or a loaded checkpoint has followed since the iteration's first tensor.
        """
        return iter(FullWeights(self._while_attached("full_weights()"), module, dtype))

    def export(
        self,
        directory: str | os.PathLike[str],
        module: torch.nn.Module | None = None,
        *,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str = "5GB",
    ) -> None:
        """Write the full weights to safetensors files, as ``from_pretrained`` and inference engines load them.

        Rank 0 writes ``model.safetensors``, or files of ``max_shard_size`` with ``model.safetensors.index.json``; for a
        model of transformers, ``config.json`` too. It takes the memory of :meth:`full_weights`. The files get these
        names once all are complete, and replace an earlier export. A tied tensor is written once, under its first name.
        Collective.

        Args:
            directory: for the files.
            module: as for :meth:`full_weights`. The same on all ranks.
            dtype: as for :meth:`full_weights`. The same on all ranks.
            max_shard_size: bytes of tensors per file, or a size as ``"2GiB"``. A larger tensor gets its own file.

        Raises:
            CheckpointError: on every rank, if rank 0 could not write.
            ValueError: as :meth:`full_weights`; or safetensors does not have the dtype; or groups of ranks have
                different parameters under one name (:func:`~zerosync_strategy.shard_over`).
        """
        max_shard_bytes = parse_bytes("max_shard_size", max_shard_size)
        export_weights(self._while_attached("export()"), Path(directory), module, dtype, max_shard_bytes)

    def full_state(self) -> dict[str, torch.Tensor]:
        """Return this rank's share of stage 3's parameters in full, on the CPU. Collective.

        Returns:
            By name, the parameters for which this rank is the first of the ranks that shard them: without
            :func:`~zerosync_strategy.shard_over`, all parameters on rank 0 and none elsewhere.

        Raises:
            ValueError: the engine is not of stage 3.
        """
        return full_state(self._while_attached("full_state()"))

    def load_full_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set stage 3's parameters to the values that :meth:`full_state` has returned on this rank. Collective.

        Raises:
            ValueError: on every rank, if a parameter is missing or has another shape on some rank.
        """
        attached = self._while_attached("load_full_state()")
        self.abort("load_full_state() was called")
        load_full_state(attached, state)

    def wait_for_save(self) -> None:
        """Wait until no checkpoint is being written in the background. Call it on every rank.

        A later save or load, the end of the training and of the program wait, too.

        Raises:
            CheckpointError: on every rank, if one could not write.
        """
        self._while_attached("wait_for_save()")
        wait_for_save()

    def detach(self) -> None:
        """Restore the engine to DeepSpeed's own behaviour.

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
        """Detach from an engine that is not used any more: drops an open window and sends nothing.

        The optimizer's shards are then not in DeepSpeed's own order. ``engine.destroy()`` does the same.
        """
        if self._is_attached:
            self._attached.destroyed()
