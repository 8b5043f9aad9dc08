"""ZeRO-3: the entries of ``state_dict()`` for sharded parameters, which one rank may copy, move and save alone (N1).

Other reads of a sharded parameter gather it, on all ranks alike. But programs save on one rank, by
``torch.save(module.state_dict())`` or by a library that copies what it saves. So an entry behaves as follows:

===========================  ==========================================================================================
what a program does          what happens
===========================  ==========================================================================================
computes with it, loads it   as with every sharded parameter: the values are gathered, on all ranks
copies or moves it           a :class:`Copied` of this rank's shard, without communication
computes with the copy       the values at the time of the copy are gathered, on all ranks; then it is a plain tensor
pickles it, reads its bytes  it is empty, as in DeepSpeed, so that no loader takes it for weights; a warning says so.
                             If the parameter is gathered at that time, it is saved with its values
===========================  ==========================================================================================
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from zerosync_strategy.core.engine import compilation, gathering, zero3
from zerosync_strategy.core.engine.types import Zero3Parameter
from zerosync_strategy.core.failures.errors import HANDLE

# ---- which of torch's functions ask for something that does not depend on the values ---------------------------------

CONVERSIONS = {"to", "cpu", "cuda", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous"}
"""Names of functions that return a tensor of another dtype, device or layout, or the same one."""
GET_DATA, SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SHAPE = "shape size dim ndim ndimension numel nelement stride storage_offset is_contiguous nbytes __len__"
_OBJECT = """
    dtype device requires_grad grad is_leaf grad_fn layout names name itemsize output_nr retains_grad grad_dtype
    is_cuda is_cpu is_xpu is_mps is_meta is_hpu is_maia is_mtia is_vulkan is_ipu is_sparse is_sparse_csr is_quantized
    is_mkldnn is_nested _version _backward_hooks _post_accumulate_grad_hooks _cdata _base _grad _grad_fn
    element_size is_floating_point is_complex is_signed is_inference is_shared is_pinned get_device is_neg is_conj
    has_names requires_grad_ register_hook retain_grad register_post_accumulate_grad_hook
    _is_view _is_zerotensor _has_symbolic_sizes_strides __dir__ __hash__
"""
_BYTES = "data_ptr untyped_storage storage _typed_storage"


def _functions_of(names: str) -> set[object]:
    """Return the functions that call, get, set and delete these members of a tensor."""
    functions: set[Any] = set()
    for name in names.split():
        member: Any = getattr(torch.Tensor, name, None)  # not every torch has each of them
        functions |= {member.__get__, member.__set__, member.__delete__} if hasattr(member, "__set__") else {member}
    return functions


OF_THE_SHAPE = _functions_of(_SHAPE) | {torch.numel}
OF_THE_BYTES = _functions_of(_BYTES)
"""They show where the values lie."""
# Questions about a parameter that need no values, and have the same answers with and without them.
OF_THE_OBJECT = _functions_of(f"{_OBJECT} {_BYTES} record_stream detach_") | {
    *(torch.is_floating_point, torch.is_complex, torch.is_signed, torch.is_inference),
}
REQUIRE_GRADIENT = {torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
# ... and that go to the parameter if autograd has computed the tensor with its values.
OF_A_LEAF = {*_functions_of("requires_grad requires_grad_ grad _grad is_leaf grad_fn _grad_fn"), SET_DATA}


# ---- entries ---------------------------------------------------------------------------------------------------------

_WITH_ITSELF = {GET_DATA, torch.Tensor.detach, torch.detach, torch.Tensor.contiguous}
_COPIES = CONVERSIONS | {"clone"}
_WARNS = "_zerosync_warns_of_what_is_left"  # attribute of a module whose state_dict() warns


class StateEntry(torch.Tensor):
    """The entry of a ``state_dict()`` for ``zerosync_param``, or a copy of it: what both answer without the values.

    After a program has asked for its bytes, as safetensors does, it also shows the shape of those bytes: empty.
    """

    zerosync_param: Zero3Parameter
    zerosync_shows_bytes = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if not args or not isinstance(args[0], StateEntry):
            return cls._compute(func, types, args, kwargs)
        entry, *others = args
        if func in OF_THE_BYTES:
            entry.zerosync_shows_bytes = True
            with zero3.as_it_is():
                if func is torch.Tensor.data_ptr and entry.numel() == 0:
                    _warn_once()
        if func in OF_THE_OBJECT or (func in OF_THE_SHAPE and entry.zerosync_shows_bytes):
            with zero3.as_it_is():
                return func(*args, **kwargs)
        if func in OF_THE_SHAPE:
            return func(zero3.without_values(entry.zerosync_param, entry.dtype), *others, **kwargs)
        if func in _WITH_ITSELF:
            return entry
        if getattr(func, "__name__", "") in _COPIES and (shard := entry.zerosync_shard()) is not None:
            kwargs.pop("memory_format", None)  # it applies to the full shape
            with zero3.as_it_is():
                described = func(entry, *others, **kwargs)
                return entry if described is entry else _copied(entry, described, func(shard, *others, **kwargs), shard)
        return cls._compute(func, types, args, kwargs)

    @classmethod
    def _compute(cls, func: Any, types: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        raise NotImplementedError

    def zerosync_shard(self) -> torch.Tensor | None:
        """Return this rank's part of the values, flat; ``None`` if they are not gathered from parts."""
        raise NotImplementedError

    def __copy__(self) -> StateEntry:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: object) -> str | tuple[Any, ...]:
        _warn_once()
        return torch.empty(0, dtype=self.dtype, device=self.device).__reduce_ex__(protocol)


def in_full(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``; if it is an entry of a ``state_dict()`` for a sharded parameter, its values. Collective."""
    return tensor.add(0) if isinstance(tensor, StateEntry) else tensor


class Copied(StateEntry):
    """A copy of an entry, with its dtype and device and the values at the time of the copy."""

    zerosync_copy: torch.Tensor  # of this rank's shard; never written

    def __repr__(self) -> str:  # type: ignore[override]
        return f"copy of: {self.zerosync_param!r}"

    def zerosync_shard(self) -> torch.Tensor:
        return self.zerosync_copy

    @classmethod
    def _compute(cls, func: Any, types: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        tree_map_only(Copied, Copied.zerosync_gather, (args, kwargs))
        return func(*args, **kwargs)

    def zerosync_gather(self) -> torch.Tensor:
        """Become a plain tensor with the values. Collective."""
        param, record = self.zerosync_param, getattr(self.zerosync_param, "_zerosync_record", None)
        in_order = nullcontext(0) if record is None else record.owner.issuing.gathering(record.group, [param])
        with torch.inference_mode(False), torch.no_grad(), in_order, zero3.as_it_is():
            self.data = gathering.gather_copied(param, self.zerosync_copy).to(self.device)
        del self.zerosync_copy, self.zerosync_param
        self.__class__ = torch.Tensor  # type: ignore[assignment]
        return self


for _class in (StateEntry, Copied):
    compilation.leave_to_eager_code(_class)


def _copied(entry: StateEntry, described: torch.Tensor, copy: torch.Tensor, shard: torch.Tensor) -> Copied:
    described.__class__ = Copied
    described.zerosync_param = entry.zerosync_param  # type: ignore[attr-defined]
    described.zerosync_copy = copy.clone() if copy is shard else copy  # type: ignore[attr-defined]
    return described  # type: ignore[return-value]


def warn_of_what_is_left(module: torch.nn.Module) -> None:
    """Make ``state_dict()`` of ``module`` warn that it has no values: its engine is gone and has left it sharded."""

    def warn(module: torch.nn.Module, *_: object) -> None:
        for name, param in module.named_parameters():
            if zero3.is_left_sharded(param):
                warnings.warn(
                    f"state_dict() was called when the ZeRO-3 engine of the {type(module).__name__} was destroyed, as"
                    f" by accelerator.end_training(): what it has of sharded parameters, as of {name!r}, is empty. Save"
                    f" before that, by zerosync.export(directory) or zerosync.full_state() on all ranks. ({HANDLE}.)",
                    stacklevel=3,
                )
                break

    if not vars(module).get(_WARNS):
        vars(module)[_WARNS] = True
        module.register_state_dict_post_hook(warn)


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        "What state_dict() has of parameters that ZeRO-3 shards was pickled, or its bytes were read, as by torch.save()"
        " or safetensors: what is written is empty, as with DeepSpeed alone, and no loader takes it for weights. For"
        " weights, call zerosync.export(directory) or zerosync.full_weights() on all ranks, save the state_dict()"
        " inside 'with zerosync.full_parameters():', or give save_pretrained()"
        f" state_dict=accelerator.get_state_dict(model). ({HANDLE}.)",
        stacklevel=4,
    )
