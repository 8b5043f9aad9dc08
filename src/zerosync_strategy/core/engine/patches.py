"""What ZeroSync replaces: in the whole process, one list with the purpose of each entry; of a live object, its class.

All that is installed is undone with the last user: an attached engine that is detached, destroyed or collected; or an
object of a frontend, which exists before and after its engine. If someone else has replaced ours in turn, theirs stays.
Ours then cannot be removed, and acts like the stock one until it is installed again.

An object gets a subclass of its class, with our methods first. Unlike an attribute of the instance, that also works
for code that looks up methods on the type, such as Lightning's optimizer wrapper. Undoing it leaves no trace.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerosync_strategy.core.engine.contract import resolve

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self


@dataclass(frozen=True)
class Patch:
    """One replacement, of ``name`` in the module or class at the path ``owner``.

    ``stays``: why the last user does not undo it, or what undoes it earlier; empty: the last user undoes it.
    """

    owner: str
    name: str
    why: str
    stays: str = ""


_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_BACKEND = "deepspeed.comm.comm.cdb"
_STAGE12 = "deepspeed.runtime.zero.stage_1_and_2"
_PARTITION = "deepspeed.runtime.zero.partition_parameters"
_AVERAGED = "torch.optim.swa_utils.AveragedModel"
_TRANSFORMED = "transforms of torch.func that are given sharded parameters get their values"
_GATHERED = "a context gathers in buckets, and one that is left keeps what is held"
_BLOCK = 'a configuration with a "zerosync" block trains with ZeroSync'
_IMPORTED = "it is what the import of zerosync_strategy.accelerate asks for; without a block, it does what it did"
_NAMES = "DeepSpeed calls collectives by their names in torch 2.13, because the old ones warn"
_UNNAMED = "fabric.backward(loss) of several models need not name one"
_LATER = "fabric.setup_module() first, fabric.setup_optimizers() later"

# fmt: off
BROADCAST_MODEL = Patch(_ENGINE, "_broadcast_model", "parameters without dimensions are broadcast")
CONFIGURE_MODEL = Patch(_ENGINE, "_configure_distributed_model", "parameters may be in any memory layout")
SHARD = Patch(f"{_PARTITION}.Init", "_zero_init_param",
              "parameters without dimensions, and in any memory layout, are sharded")
ENTER_INIT = Patch(f"{_PARTITION}.Init", "__enter__", "a zero.Init inside another one, over other ranks, is an error")
ENTER_GATHERED = Patch(f"{_PARTITION}.GatheredParameters", "__enter__", _GATHERED)
LEAVE_GATHERED = Patch(f"{_PARTITION}.GatheredParameters", "__exit__",
                       f"{_GATHERED}; parameters without dimensions are broadcast")
OUTPUTS = Patch("deepspeed.runtime.zero.parameter_offload", "vars", "modules may return what has no attributes")
LINEAR = Patch("deepspeed.runtime.zero.linear.zero3_linear_wrap", "__code__", "a linear layer of ZeRO-3 is torch's own")
TORCHS_LINEAR = Patch("torch.nn.functional", "linear", "it is called at once where DeepSpeed has put its own here")
FULL_GRADIENT = Patch("deepspeed.utils.tensor_fragment.safe_get_full_grad", "__code__",
                      "before DeepSpeed 0.19.8, it looks for a window's gradient, too")
RANGES = Patch("deepspeed.utils.nvtx", "enable_nvtx", "on CPU, no ranges for profilers, which have none there")
SHARED_MEMORY = Patch("deepspeed.ops", "__compatible_ops__['deepspeed_shm_comm']",
                      "on CPU, DeepSpeed starts without a compiler")
ZERO_GRAD = Patch("torch.nn.Module", "zero_grad", "gradients that were reduced already are dropped, too")
GATHER = Patch(_BACKEND, "all_gather_function", _NAMES)
REDUCE_SCATTER = Patch(_BACKEND, "reduce_scatter_function", _NAMES)
MAKE_AVERAGE = Patch(_AVERAGED, "__init__", "a copy of sharded parameters is an error")
UPDATE_AVERAGE = Patch(_AVERAGED, "update_parameters", "the average of a ZeRO-3 model is one of full parameters")
DIFFERENTIATED = Patch("torch._functorch.eager_transforms", "_wrap_for_grad", _TRANSFORMED)
BATCHED = Patch("torch._functorch.vmap", "_add_batch_dim", _TRANSFORMED)
FABRIC = Patch("lightning.fabric.Fabric", "_validate_setup_optimizers", _LATER)
OTHER_FABRIC = Patch("lightning_fabric.Fabric", "_validate_setup_optimizers", _LATER)
FABRIC_BACKWARD = Patch("lightning.fabric.Fabric", "backward", _UNNAMED)
OTHER_FABRIC_BACKWARD = Patch("lightning_fabric.Fabric", "backward", _UNNAMED)
DEEPSPEED_INIT = Patch("transformers.integrations.deepspeed", "deepspeed_init",
                       "the optimizer and scheduler that a Trainer was given are used, and train() may be called again")
ACCELERATE_PLUGIN = Patch("accelerate.utils.DeepSpeedPlugin", "__post_init__", _BLOCK, stays=_IMPORTED)
ACCELERATE_PREPARE = Patch("accelerate.accelerator.Accelerator", "_prepare_deepspeed", _BLOCK, stays=_IMPORTED)
ACCELERATE_BACKEND = Patch("accelerate.state.PartialState", "_prepare_backend",
                           "without an accelerator, ranks find each other", stays=_IMPORTED)
ACCELERATE_STATE = Patch("accelerate.state.AcceleratorState", "__init__",
                         "cpu=True, which switches DeepSpeed off, is an error", stays=_IMPORTED)
INITIALIZE = Patch("deepspeed", "initialize", "ZeroSync attaches to the engines that a program makes",
                   stays="it is there where zerosync run has asked for it")
STEP_GATHER = Patch(_STAGE12, "all_gather_dp_groups", "on stages 1 and 2, a step gathers in buckets",
                    stays="it lasts as long as a step")
SHARD_GATHER = Patch(_PARTITION, "_dist_allgather_fn", "DeepSpeed's own gathers send each byte once",
                     stays="it lasts as long as a gather")
SAVED_TENSORS = Patch("torch.autograd.graph", "disable_saved_tensors_hooks",
                      "transforms of torch.func, which refuse hooks on saved tensors, run beside ours",
                      stays="it lasts as long as a unit's forward")
SCHEDULE = Patch("deepspeed.compile.backend", "remaining_schedule", "DeepCompile runs one more pass",
                 stays="compiled graphs stay")
ACCELERATOR = Patch("deepspeed.accelerator", "set_accelerator()", "prepare_cpu() has chosen the CPU",
                    stays="engines that were made go on with it")
EXIT = Patch("the process", "exit", "on CPU, a pause of 0.1 s, in which gloo's threads end",
             stays="gloo's threads end with the process")
# fmt: on

EVERY = tuple(value for value in list(globals().values()) if isinstance(value, Patch))
"""All patches, in the order of the documentation."""

_ABSENT: Any = object()
_installed: dict[Patch, Callable[[], None]] = {}  # with the function that undoes each
_buried: dict[Patch, tuple[Any, Any]] = {}  # stock and ours, if someone has replaced ours since
_users: dict[int, weakref.ref[Any]] = {}


def add_user(user: object) -> None:
    """Keep what is installed until :func:`remove_user`, or until ``user`` is collected."""
    key = id(user)
    _users[key] = weakref.ref(user, lambda _: _remove(key))


def remove_user(user: object) -> None:
    """Undo all that is installed if ``user`` is the last."""
    _remove(id(user))


def is_installed(patch: Patch) -> bool:
    """Return whether ``patch`` is installed; it is only while ZeroSync has users."""
    return patch in _installed


def install(patch: Patch, undo: Callable[[], None] | None = None) -> None:
    """Record that ``patch`` was installed, and how to undo it; one that stays has no ``undo``."""
    assert (undo is None) is bool(patch.stays), patch
    _installed[patch] = undo or (lambda: None)


def replace(patch: Patch, make: Callable[[Any], object]) -> None:
    """Replace the attribute of ``patch`` by the result of ``make(stock)``. Does nothing if it is installed."""
    if patch in _installed:
        return
    owner = resolve(patch.owner)
    stock = vars(owner).get(patch.name, _ABSENT)
    buried = _buried.pop(patch, None)
    if buried is not None and stock is not buried[0]:
        stock, ours = buried  # ours is outermost, or below someone else's: use it again
    else:
        ours = make(getattr(owner, patch.name, None))
        setattr(owner, patch.name, ours)

    def undo() -> None:
        found = vars(owner).get(patch.name, _ABSENT)
        if found is ours and stock is _ABSENT:
            delattr(owner, patch.name)
        elif found is ours:
            setattr(owner, patch.name, stock)
        elif found is not stock:
            _buried[patch] = stock, ours

    _installed[patch] = undo


def wrap(patch: Patch, around: Callable[..., object]) -> None:
    """:func:`replace` a function by one that calls ``around`` with the stock function and its arguments."""

    def make(stock: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(stock)
        def call(*args: object, **kwargs: object) -> object:
            return around(stock, *args, **kwargs)

        return call

    replace(patch, make)


def _remove(key: int) -> None:
    if _users.pop(key, None) is None or _users or sys.is_finalizing():
        return
    for patch in [each for each in _installed if not each.stays][::-1]:
        _installed.pop(patch)()


# ---- methods of a live object ----------------------------------------------------------------------------------------


Stock: Any = object
"""The base of a class of overrides: ``super()`` refers to the object on which it is interposed."""
_PREFIX = "ZeroSync"


def interpose(target: object, layer: type, also: tuple[type, ...] = ()) -> None:
    """Put the methods of ``layer`` before those of ``target``, which they call through ``super()``.

    The new class is named after the stock class and ZeroSync, as ``ZeroSyncDeepSpeedEngine``. It also inherits from
    ``also``, whose methods come after those of ``target``.
    """
    stock = type(target)
    name = f"{_PREFIX}{stock.__name__.removeprefix(_PREFIX)}"
    # With the layer as a base, the object layout would differ if the first base of the class has no
    # __dict__, such as abc.ABC, and Python would refuse the assignment.
    kind = type(stock)
    metaclass = kind if issubclass(kind, _Layered) else type("_Layered", (_Layered, kind), {})
    members = {"__module__": layer.__module__, "__doc__": stock.__doc__, "__slots__": (), "_zerosync_layer": layer}
    object.__setattr__(target, "__class__", metaclass(name, (stock, *also), members))


class _Layered(type):
    """The metaclass of classes whose method resolution order has a layer, which is no base, before the bases."""

    def mro(cls) -> list[type]:
        stock = super().mro()
        layer = vars(cls).get("_zerosync_layer")  # a subclass inherits it from its bases' order
        return stock if layer is None else [cls, *(each for each in layer.__mro__ if each not in stock), *stock[1:]]


@contextmanager
def replaced(target: object, name: str, value: object) -> Iterator[None]:
    """While active, the attribute ``name`` of ``target``, its own or inherited, is ``value``."""
    before, is_own = getattr(target, name), name in getattr(target, "__dict__", ())
    setattr(target, name, value)
    try:
        yield
    finally:
        if not is_own and name in getattr(target, "__dict__", ()):
            delattr(target, name)  # its class has it
        else:
            setattr(target, name, before)


def restore(target: object, layer: type) -> None:
    """Undo :func:`interpose` of ``layer``; raise ``RuntimeError`` if it is not the outermost layer of ``target``."""
    outermost = vars(type(target)).get("_zerosync_layer")
    if outermost is not layer:
        raise RuntimeError(
            f"restore() was asked to take {layer.__name__} off a {type(target).__name__}, whose outermost layer is"
            f" {getattr(outermost, '__name__', None)}. Take layers off in the reverse order of interpose()."
        )
    object.__setattr__(target, "__class__", type(target).__bases__[0])


class ModeOverrides(Stock):
    """Overrides of ``DeepSpeedEngine``: its ``training`` mode is that of its module. DeepSpeed's own is always true."""

    module: torch.nn.Module

    @property
    def training(self) -> bool:
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.module.training = mode

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        return self  # as torch's modules do; DeepSpeed returns nothing

    def eval(self) -> Self:
        super().eval()
        return self
