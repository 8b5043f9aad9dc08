"""How far rounding alone may move a result: it is computed again, with every operation rounded otherwise.

A processor adds up in the order that suits its registers, and multiplies and adds in one rounding or in two. So
results are equal to the bit on every processor only where each element comes from the same operations in the same
order (copies, gathers, sums of two, the same program run again), or is exact in any order, as with small whole numbers.
Elsewhere they differ in the last places. What these grow to depends on the program. It is measured here, for the values
at hand, instead of being a constant that one processor meets.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakTensorKeyDictionary

from tests.harness.modes import EagerMode

# A difference may be this many times as large as what one other rounding has moved the farthest element by.
FACTOR = 16.0


class RoundedOtherwise(EagerMode):
    """Operations on tensors in fp32 are made in fp64, and rounded to the other one of the two neighbours in fp32.

    So a sum comes out as another order of its terms may leave it; what fp32 holds exactly stays as it is. Random
    numbers are those that the program draws without this.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = _WRITTEN[func] if func in _WRITTEN else _WRITTEN.setdefault(func, _arguments_written(func))
        if written is None or any(isinstance(each, torch.Tensor) and each.dtype is torch.float64 for each in args):
            return func(*args, **kwargs)
        reads: _Pairs = []
        writes: _Pairs = []
        wide_args = [_wide(each, writes if index in written else reads) for index, each in enumerate(args)]
        wide_kwargs = {name: _wide(each, writes if name in written else reads) for name, each in kwargs.items()}
        result = func(*wide_args, **wide_kwargs)
        for single, wide in writes:
            single.copy_(_rounded(wide))
        return _narrow(result, writes) if written else _rounded(result) if reads else result


_Pairs = list[tuple[torch.Tensor, torch.Tensor]]
_WRITTEN: dict[Any, set[int | str] | None] = {}


def _arguments_written(func: Any) -> set[int | str] | None:
    """By position and by name; or None if the operation only moves values, draws random numbers, or has no fp64."""
    is_view = func.is_view or torch.Tag.inplace_view in func.tags
    is_move = is_view or func._schema.name in ("aten::set_", "aten::resize_", "aten::_to_copy")
    has_no_fp64 = func._schema.name == "aten::_grouped_mm"
    if is_move or has_no_fp64 or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    arguments = enumerate(func._schema.arguments)
    written = [(index, each.name) for index, each in arguments if each.alias_info and each.alias_info.is_write]
    return {key for keys in written for key in keys}


def _wide(value: Any, pairs: _Pairs) -> Any:
    """`value`, or a tree of values, with copies in fp64 of what is in fp32; each goes to `pairs` with its original."""
    if isinstance(value, torch.Tensor):
        if value.dtype is not torch.float32 or value.layout is not torch.strided:
            return value
        pairs.append((value, value.double()))
        return pairs[-1][1]
    return [_wide(each, pairs) for each in value] if isinstance(value, list | tuple) else value


def _narrow(value: Any, pairs: _Pairs) -> Any:
    """The original of each copy."""
    if isinstance(value, list | tuple):
        return type(value)(_narrow(each, pairs) for each in value)
    return next((single for single, wide in pairs if wide is value), value)


def _rounded(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_rounded, value))
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float64:
        return value
    nearest = value.float()
    beyond = torch.lerp(nearest.double(), value, 2.0**60).float()
    is_finite = (nearest - nearest).logical_not()  # two operators, where isfinite() is four
    return torch.where(is_finite, torch.nextafter(nearest, beyond), nearest)


def bounded(compute: Callable[[], Any], meanwhile: AbstractContextManager[Any] | None = None) -> Any:
    """What `compute()` returns, a tree in which each tensor has the attribute `rounding` that `excess` looks at.

    It is called twice; the first time rounded otherwise, in the context `meanwhile`.
    """
    with meanwhile or nullcontext(), RoundedOtherwise():
        otherwise = [each.clone() if isinstance(each, torch.Tensor) else each for each in tree_flatten(compute())[0]]
    found = compute()
    for one, other in zip(tree_flatten(found)[0], otherwise, strict=True):
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            one.rounding = least(other - one, one)
    return found


def excess(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of any element, or 0 where rounding explains it.

    It explains nothing, and the two are equal to the bit, where nobody has measured: `expected` has no `rounding`.
    """
    if not expected.is_floating_point():
        return float(not torch.equal(ours, expected))
    largest = _largest(ours - expected)

    return largest if largest > FACTOR * getattr(expected, "rounding", 0.0) else 0.0


def least(moved: torch.Tensor, value: torch.Tensor) -> float:
    """The farthest that an element of `value` was moved by; at least one unit in the last place of the largest."""
    return max(_largest(moved), torch.finfo(value.dtype).eps * _largest(value.detach()))


def _largest(difference: torch.Tensor) -> float:
    assert torch.isfinite(difference).all()
    return difference.abs().max().item() if difference.numel() else 0.0


class Drift:
    """Of each parameter and each tensor of its optimizer's state: how far training rounded otherwise has moved it.

    What is kept are differences, so that a parameter may be written to and a state loaded between two steps.
    """

    def __init__(self) -> None:
        self._of = WeakTensorKeyDictionary()

    def of(self, param: torch.Tensor, name: str = "", value: torch.Tensor | None = None) -> float:
        """The farthest that an element of the parameter was moved, or of that state of it, whose value is given."""
        drift = self._of.get(param, {}).get(name)
        return 0.0 if drift is None else least(drift, param if value is None else value)

    def moved(self, param: torch.Tensor, values: dict[str, Any]) -> dict[str, Any]:
        """Copies of `values` where that training has them; the parameter's own has an empty name."""
        drift, moved = self._of.get(param, {}), {}
        for name, value in values.items():
            moved[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
            if name in drift:
                moved[name] += drift[name]
        return moved

    @contextmanager
    def applied(self, params: Iterable[torch.Tensor]) -> Iterator[None]:
        """Parameters have the values of that training."""
        own = {param: param.data for param in params}
        for param, values in own.items():
            param.data = self.moved(param, {"": values})[""]
        try:
            yield
        finally:
            for param, values in own.items():
                param.data = values

    def note(self, param: torch.Tensor, values: dict[str, Any], moved: dict[str, Any]) -> None:
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        self._of[param] = {name: moved[name].detach() - value.detach() for name, value in tensors.items()}
