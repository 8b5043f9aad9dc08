"""DeepSpeed's hooks and its linear function, which ours replace; our hooks on gradients and on saved tensors.

A program may register hooks on a parameter's gradient at any time, for example to mask or log it. The gradient that
they leave is the one to reduce, so ours must run last. PyTorch runs the hooks of a tensor in the order of a dictionary.

Hooks on what autograd saves in a forward show that a backward has come to it, whatever way the backward takes. Hooks
on a unit's outputs (``params/unit_hooks.py``) see a backward that comes through an output. But tensors may leave
a unit beside its outputs: a loss that it keeps as an attribute, keys in a cache, what a forward hook of the program has
caught. A backward may reach these first, or alone. Hooks on saved tensors see that, too, but cost two calls for each
saved tensor. So they are used only

- in the first steps, unless the model is compiled: its graphs would be compiled again when that ends;
- from then on, if a backward has come to a unit by a saved tensor first, or a unit has made nodes of the graph after
  the last of its outputs. Autograd runs the nodes of a graph in the reverse of the order in which they were made, so
  that it reaches an output first, unless there are such nodes or the loss does not depend on the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import graph

from zerosync_strategy.core.engine import patches
from zerosync_strategy.core.engine.patches import replaced
from zerosync_strategy.core.engine.types import DeepSpeedEngine, ZeroOptimizer

_DISABLED = "_torchdynamo_orig_callable"  # attribute of what torch.compiler.disable() returns


def remove_stock(engine: DeepSpeedEngine) -> None:
    """Stop DeepSpeed's gathers for the modules of ``engine``, and make linear layers torch's own.

    DeepSpeed's linear layer is an autograd function for weights whose memory differs in the backward.
    """
    remove_module_hooks(engine.optimizer.parameter_offload)
    patches.interpose(engine.optimizer.parameter_offload, _WithoutHooks)
    _use_plain_linear()
    for hooks, key in forward_hooks_of(engine):
        hooks[key] = torch.compiler.disable(hooks[key])  # keep the engine's hooks out of graphs


class _WithoutHooks:
    """Overrides of what registers DeepSpeed's hooks, which a program may ask for, as TRL does after generation."""

    def _register_deepspeed_module(self, *args: object, **kwargs: object) -> None:
        return


def restore_stock(engine: DeepSpeedEngine) -> None:
    """Undo :func:`remove_stock`."""
    from deepspeed.runtime.zero import parameter_offload

    offload = engine.optimizer.parameter_offload
    patches.restore(offload, _WithoutHooks)
    with replaced(offload, "module", engine.module):  # with several engines over one module, it is a parameter tree
        offload.setup_zero_stage3_hooks()
    parameter_offload.FWD_MODULE_STACK.pop()  # the model, which was pushed a second time
    for hooks, key in forward_hooks_of(engine):
        hooks[key] = getattr(hooks[key], _DISABLED, hooks[key])


def forward_hooks_of(engine: DeepSpeedEngine) -> Iterator[tuple[dict[int, Any], int]]:
    """Yield the dictionary and key of each of the engine's own hooks around a forward."""
    for handle in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
        if handle is not None and (hooks := handle.hooks_dict_ref()) is not None and handle.id in hooks:
            yield hooks, handle.id


def remove_module_hooks(offload: Any) -> None:
    offload._remove_module_hooks()
    offload.forward_hooks.clear()


def _use_plain_linear() -> None:
    """Replace the code of DeepSpeed's linear function, because programs refer to the function object."""
    from deepspeed.runtime.zero import linear

    def zero3_linear_wrap(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch._C._nn.linear(input, weight, bias)

    if patches.is_installed(patches.LINEAR):
        return
    function: Any = linear.zero3_linear_wrap
    stock, function.__code__ = function.__code__, zero3_linear_wrap.__code__

    def undo() -> None:
        function.__code__ = stock

    patches.install(patches.LINEAR, undo)
    patches.replace(patches.TORCHS_LINEAR, lambda found: torch._C._nn.linear if found is function else found)


def drop_functions(module: nn.Module) -> None:
    """Make DeepSpeed create new autograd functions when it next registers hooks on ``module`` and its submodules.

    Each gathers by the engine for which it was made, but DeepSpeed 0.19.8 reuses it for later engines.
    """
    for submodule in module.modules():
        for name in ("pre_bwd_fn", "post_bwd_fn"):
            vars(submodule).pop(name, None)


def leave_sharded(engine: DeepSpeedEngine) -> None:
    """Destroy ``engine`` but leave the parameters of its module sharded, so that another engine may train it."""
    engine.destroy()
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()


class GradientHooks:
    """One hook on each of ``params``, until :meth:`remove`, in place of DeepSpeed's on parameters and leaf modules."""

    def __init__(
        self, optimizer: ZeroOptimizer, hooks: Iterable[tuple[nn.Parameter, Callable[[nn.Parameter], None]]]
    ) -> None:
        stock = [*optimizer._grad_acc_hooks, *getattr(optimizer, "_leaf_module_hooks", ())]
        self._stock = [
            (of, handle.id, of.pop(handle.id)) for handle in stock if handle.id in (of := handle.hooks_dict_ref() or {})
        ]
        self._handles = [_register(param, hook) for param, hook in hooks]
        self._of_params = [(handle.id, handle.hooks_dict_ref()) for handle in self._handles]
        self._dicts = [of for _, of in self._of_params]
        self._orders: list[tuple[int, ...]] = []  # after the last run_last()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for of, key, hook in self._stock:
            of[key] = hook

    def run_last(self) -> bool:
        """Make these hooks run after all hooks of the program from now on; return whether some did not."""
        if list(map(tuple, self._dicts)) == self._orders:  # three calls for all parameters
            return False
        moved = False
        for own_key, of in self._of_params:
            own = [key for key, hook in of.items() if key == own_key or _is_ours(hook)]
            if list(of)[-len(own) :] != own:
                moved = True
                for key in own:  # C reads the order of insertion, which OrderedDict.move_to_end() does not change
                    of[key] = of.pop(key)
        self._orders = list(map(tuple, self._dicts))
        return moved


def _register(param: nn.Parameter, hook: Callable[[nn.Parameter], None]) -> Any:
    requires_grad = param.requires_grad  # it may be frozen for a while
    param.requires_grad_(True)
    handle = param.register_post_accumulate_grad_hook(hook)
    param.requires_grad_(requires_grad)
    return handle


def _is_ours(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("zerosync_strategy.")


# ---- on saved tensors ------------------------------------------------------------------------------------------------


FIRST_STEPS = 2

_autograd: Any = torch._C._autograd  # torch's stubs lack some of it
nodes_made = _autograd._get_sequence_nr
"""Return how many nodes of graphs this thread has made."""


class SavedTensorHooks:
    """Decides whether forwards of ``root`` have hooks on what autograd saves.

    Attributes:
        is_used: they have.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root, self.is_used, self._is_needed = root, True, False

    def need(self) -> None:
        """Use them from now on."""
        self.is_used = self._is_needed = True

    def forward_begins(self) -> None:
        """Use them no longer where a module is compiled, unless they are needed. To be called while :attr:`is_used`."""
        if not self._is_needed and _is_compiled(self._root):
            self.is_used = False

    def stepped(self, steps: int) -> None:
        """Record that the program has made ``steps`` steps. To be called while :attr:`is_used`."""
        self.is_used = self._is_needed or steps < FIRST_STEPS


def _is_compiled(root: torch.nn.Module) -> bool:
    """Return whether ``root`` or a module inside it is compiled."""
    return any(vars(module).get("_compiled_call_impl") is not None for module in root.modules())


def hooked(unpacks: Callable[[], None]) -> ExitStack | None:
    """Until the returned stack is closed: autograd calls ``unpacks`` before it uses a tensor that it saves now.

    Return ``None``, without hooks, if the program has such hooks of its own, in whose place ours would be.
    """
    hooks = _autograd._top_saved_tensors_default_hooks(False)
    if not _autograd._saved_tensors_hooks_is_enabled() or (hooks is not None and hooks[0] is not _pack):
        return None

    def unpack(packed: tuple[torch.Tensor, int]) -> torch.Tensor:
        unpacks()
        tensor, version = packed
        if tensor._version != version:  # torch does not look where there are hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" {tensor.dtype} of {list(tensor.shape)} is at version {tensor._version}; expected version {version}"
                " instead."
            )
        return tensor

    stack = ExitStack()
    stack.enter_context(graph.saved_tensors_hooks(_pack, unpack))
    stack.enter_context(replaced(graph, patches.SAVED_TENSORS.name, _without_ours(graph.disable_saved_tensors_hooks)))
    return stack


def _pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    return tensor, tensor._version


def _without_ours(stock: Callable[..., Any]) -> Callable[..., AbstractContextManager[None]]:
    """Return a replacement of ``disable_saved_tensors_hooks``, by which transforms of torch.func refuse any hooks."""

    @contextmanager
    def disabled(*args: object, **kwargs: object) -> Iterator[None]:
        ours = []
        while (hooks := _autograd._top_saved_tensors_default_hooks(False)) is not None and hooks[0] is _pack:
            ours.append(hooks)
            _autograd._pop_saved_tensors_default_hooks()
        try:
            with stock(*args, **kwargs):
                yield
        finally:
            for hooks in reversed(ours):
                _autograd._push_saved_tensors_default_hooks(*hooks)

    return disabled


def hookable(output: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose hooks see the gradient of ``output``, even if the program changes that in place.

    A view gets another node in the graph then, while the node of its base stays.
    """
    base = output._base
    return output if base is None or base.grad_fn is None else base
