"""The contents of a distributed checkpoint of an attached engine, by name, as this rank writes and reads them.

The keys are those of ``torch.distributed.checkpoint.state_dict.get_state_dict``, which FSDP2 uses::

    model.NAME                        fp32 master weights; frozen parameters and buffers as they are
    optimizer.state.NAME.KEY          each state of the torch optimizer
    optimizer.param_groups.I.OPTION   its groups, with names as "params"
    engine                            counters, loss scale, scheduler, the program's client state
    rng.RANK                          the state of the random number generators of a rank

Nothing is gathered or copied: a rank writes the master weights and states that it steps, and reads into the same
memory. Low-precision parameters are the master weights, rounded.
"""

from __future__ import annotations

import copy
import io
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerosync_strategy.core.attached.engine import AttachedEngine, check_distributed
from zerosync_strategy.core.checkpoints.dcp import Content, Key, Piece, text_of
from zerosync_strategy.core.checkpoints.manifests import DamageError
from zerosync_strategy.core.checkpoints.readers import DCPReader, Reader
from zerosync_strategy.core.engine import engine_state, zero, zero3
from zerosync_strategy.core.engine.compilation import plain_name
from zerosync_strategy.core.engine.engine_state import FrozenStay
from zerosync_strategy.core.failures.errors import frozen_left_out
from zerosync_strategy.core.optimizer.masters import MasterPart
from zerosync_strategy.core.optimizer.whole import WholeStepper

_GROUPS = ("optimizer", "param_groups")
_STATES = ("optimizer", "state")
_ENGINE = ("engine",)


class Contents:
    """The parts of ``attached`` that a distributed checkpoint has."""

    def __init__(self, attached: AttachedEngine) -> None:
        self._attached, self._engine = attached, attached.parts.engine
        self._masters, self._stepper = attached.stage.masters, attached.stage.stepper
        self._flats = [master.flat for master in self._masters.by_param()]
        self._parts = list(self._masters.parts())
        trained = {part.param for part in self._parts}
        # Of several engines of a module, the first one has all of it, and the others what they train.
        self._is_whole = not any(
            each.number < attached.number and each.parts.engine.module is self._engine.module
            for each in AttachedEngine.all
        )
        names = attached.parts.names
        self._names = {param: plain_name(name) for param, name in names.items() if self._is_whole or param in trained}
        self._untrained = {name: param for param, name in self._names.items() if param not in trained}
        others = {param for each in AttachedEngine.all for param in each.parts.reducer.params} - trained
        self._of_others = {name for name, param in self._untrained.items() if param in others}
        self._optimizer = zero.stepping_optimizer(self._engine)
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()

    # ---- what this rank writes -----------------------------------------------------------------------------------

    def written(self, client_state: Mapping[str, object], exclude_frozen: bool) -> Content:
        """Return what this rank writes. Raise ``ValueError`` if it cannot hold a state of the optimizer."""
        check_distributed(self._engine)  # as at attach(): a step may have made states
        content = Content()
        self._add_trained(content)
        left_out = {name for name, param in self._untrained.items() if exclude_frozen and not param.requires_grad}
        for name in self._untrained.keys() - left_out:
            for piece in self._untrained_pieces(self._untrained[name], of_rank=True):
                content.add(("model", name), piece)
        content.objects["rng", str(self._rank)] = engine_state.random_state(self._engine.device)
        if self._rank == 0:
            self._add_of_first(content, client_state)
            tied = self._tied().items()
            content.names = {("model", name): ("model", first) for name, first in tied if first not in left_out}
        return content

    def _add_trained(self, content: Content) -> None:
        for part in self._parts:
            name, flat = self._names[part.param], self._flats[part.number]
            shaped, scalars = self._states_at(part)
            for key, values in {("model", name): flat.data, **_keyed(name, shaped)}.items():
                if part.numel:
                    content.add(key, _piece(part, values))
            for key, value in _keyed(name, scalars).items() if part.numel and part.start == 0 else ():
                if torch.is_tensor(value) and value.numel() > 1:
                    raise ValueError(
                        f"save_checkpoint() found that the optimizer {type(self._optimizer).__name__} keeps a state"
                        f" {key[-1]!r} of shape {tuple(value.shape)} for the {flat.numel()} elements of a rank, which"
                        " another number of ranks could not use. Save with checkpoint_format='deepspeed'."
                    )
                _put(content, key, value)
        if isinstance(self._stepper, WholeStepper):
            for param in self._stepper.masters:
                for key, value in _keyed(self._names[param], self._stepper.states_of(param)).items():
                    _put(content, key, value)

    def _states_at(self, part: MasterPart) -> tuple[Mapping[str, object], Mapping[str, object]]:
        if isinstance(self._stepper, WholeStepper):
            return {}, {}
        return self._stepper.states_at(part.param, part.number, self._flats[part.number])

    def _add_of_first(self, content: Content, client_state: Mapping[str, object]) -> None:
        for index, (group, params) in enumerate(zip(self._optimizer.param_groups, self._masters.groups(), strict=True)):
            options = {**group, "params": [self._names[param] for param in params]}
            for option, value in options.items():
                _put(content, (*_GROUPS, index, option), value)
        for name, value in self._others().items():
            _put(content, ("model", plain_name(name)), value)
        said = io.BytesIO()
        torch.save(dict(client_state), said)  # at once, as it raises if that is impossible
        content.objects[_ENGINE] = engine_state.state(self._engine) | {"client_state": said.getvalue()}

    def _others(self) -> dict[str, object]:
        """Return what ``module.state_dict()`` has beside parameters, by its names: buffers, extra states of modules."""
        if not self._is_whole:
            return {}
        params = dict(self._engine.module.named_parameters(remove_duplicate=False))
        state = self._engine.module.state_dict(keep_vars=True)
        return {
            name: value for name, value in state.items()
            if name not in params and not isinstance(value, torch.nn.Parameter)
        }  # fmt: skip

    def _tied(self) -> dict[str, str]:
        every = self._engine.module.named_parameters(remove_duplicate=False)
        tied = {plain_name(name): self._names[param] for name, param in every if param in self._names}
        return {name: first for name, first in tied.items() if name != first}

    def _untrained_pieces(self, param: torch.nn.Parameter, of_rank: bool) -> Iterator[Piece]:
        """Yield this rank's pieces of a parameter that the optimizer lacks; ``of_rank``: only what it writes."""
        shape = zero3.full_shape(param)
        if zero3.is_sharded(param) and zero3.full_numel(param):
            start, numel = zero3.own_range(param)
            if numel:
                yield Piece(shape, start, zero3.own_shard(param).view(-1)[:numel])
            return
        flat = param.data.reshape(-1)
        bounds = [flat.numel() * rank // self._ranks for rank in (self._rank, self._rank + 1)]
        begin, end = bounds if of_rank and flat.numel() else (0, flat.numel())
        if begin < end or (not flat.numel() and (self._rank == 0 or not of_rank)):
            yield Piece(shape, begin, flat[begin:end])

    # ---- what it reads -------------------------------------------------------------------------------------------

    def examine(self, reader: Reader, strict: bool, states: bool) -> None:
        """Raise ``DamageError`` if the checkpoint is not one of this module and, with ``states``, optimizer."""
        shapes = {param: zero3.full_shape(param) for param in self._names}
        here = {name: shapes[param] for param, name in self._names.items()}
        here |= {name: here[first] for name, first in self._tied().items()}
        there = {
            str(key[1]): stored.shape for key, stored in reader.stored.items() if key[0] == "model" and len(key) > 1
        }
        if not there:
            raise DamageError(
                "it has no 'model'. Save {'model': ..., 'optimizer': ...}, as get_state_dict() returns them"
            )
        buffers = {
            plain_name(name): tuple(each.shape) for name, each in self._others().items() if torch.is_tensor(each)
        }
        for name, shape in (here | buffers).items():
            if name in there and shape != there[name]:
                raise DamageError(f"{name!r} has the shape {there[name]} there, and {shape} here")
        wanted = [*here, *map(plain_name, self._others())]
        known = (
            {*wanted} if self._is_whole else {*wanted, *map(plain_name, self._engine.module.state_dict(keep_vars=True))}
        )
        there_or_others = there.keys() | self._of_others  # DeepSpeed's checkpoint of each engine has what it trains
        missing, unknown = [name for name in wanted if name not in there_or_others], sorted(there.keys() - known)
        frozen = {name for name, param in self._untrained.items() if not param.requires_grad}
        frozen |= {name for name, first in self._tied().items() if first in frozen}
        only_frozen = bool(missing) and not unknown and frozen.issuperset(missing)
        if only_frozen and strict and not isinstance(self._engine, FrozenStay):
            raise DamageError(frozen_left_out(missing[0]))
        if strict and (missing or unknown) and not only_frozen:
            raise DamageError(_difference("parameters and buffers", missing, unknown, "load_module_strict=False"))
        if not here.keys() & there.keys():
            raise DamageError(
                f"it has none of the parameters here, such as {next(iter(here))!r}. Is it of another model?"
            )
        if states:
            self._examine_states(reader, strict)

    def _examine_states(self, reader: Reader, strict: bool) -> None:
        saved = _saved_groups(reader)
        there = {name for options in saved.values() for name in options["params"]}
        here = {self._names[param] for params in self._masters.groups() for param in params}
        alone = "Load its weights alone: load_optimizer_states=False"
        if not there:
            raise DamageError(
                f"it has no optimizer states, as get_state_dict() returns them without options of its own. {alone}"
            )
        for key in reader.stored:
            if key[0] == "optimizer" and len(key) > 4:
                raise DamageError(f"its {text_of(key)!r} is part of a nested state, which is not read. {alone}")
        if not isinstance(self._stepper, WholeStepper):
            self._examine_shapes(reader, alone)
        if strict and here != there:
            missing, unknown = sorted(here - there), sorted(there - here)
            how = "load_module_strict=False (missing ones then begin anew), or load_optimizer_states=False"
            raise DamageError(_difference("parameters of the optimizer", missing, unknown, how))
        self._options(saved)

    def _examine_shapes(self, reader: Reader, alone: str) -> None:
        shapes = {self._names[part.param]: zero3.full_shape(part.param) for part in self._parts}
        for key, stored in reader.stored.items():
            shape = shapes.get(str(key[2])) if key[:2] == _STATES else None
            if shape is not None and math.prod(stored.shape) > 1 and stored.shape != shape:
                raise DamageError(
                    f"its {text_of(key)!r} has the shape {stored.shape}, and {type(self._optimizer).__name__} steps"
                    f" flat shards. Load it with the optimizer with which it was saved. {alone}"
                )

    @torch.no_grad()
    def read(self, reader: Reader, states: bool) -> None:
        """Read the values into this rank's memory."""
        wanted: dict[Key, list[Piece]] = defaultdict(list)
        for part in self._parts:
            if part.numel and (key := ("model", self._names[part.param])) in reader.stored:
                wanted[key].append(_piece(part, self._flats[part.number].data))
        scalars = self._want_states(reader, wanted) if states else None
        copied = []  # pieces of parameters that are not contiguous
        for name, param in self._untrained.items():
            if ("model", name) in reader.stored:
                pieces = list(self._untrained_pieces(param, of_rank=False))
                wanted["model", name] += pieces
                copied += [
                    (param, piece) for piece in pieces if not zero3.is_sharded(param) and not param.is_contiguous()
                ]
        reader.read(wanted)
        for param, piece in copied:
            param.data.copy_(piece.values.view_as(param))
        keys = {name: ("model", plain_name(name)) for name in self._others()}
        others = {name: reader.object(key) for name, key in keys.items() if key in reader.stored}
        self._engine.module.load_state_dict(others, strict=False)
        if scalars is not None:
            self._set_states(reader, scalars)

    def give(self) -> None:
        """Give all ranks the parameters of the master weights that were read. Collective."""
        self._attached.stage.take_masters(self._untrained.values())

    def _want_states(self, reader: Reader, wanted: dict[Key, list[Piece]]) -> dict[torch.nn.Parameter, dict[str, Any]]:
        """Add the states by element to ``wanted``, in memory for them; return the others, by parameter."""
        of_names: dict[str, set[str]] = defaultdict(set)
        for key in reader.stored:
            if key[:2] == _STATES and len(key) == 4:
                of_names[str(key[2])].add(str(key[3]))
        if isinstance(self._stepper, WholeStepper):
            own = self._stepper.masters
            return {param: _states(reader, self._names[param], of_names[self._names[param]]) for param in own}
        shapes = {self._names[part.param]: zero3.full_shape(part.param) for part in self._parts}
        shaped = _shaped_keys(reader, shapes, of_names)
        for number, flat in enumerate(self._flats):
            names = {self._names[part.param] for part in self._parts if part.number == number}
            kinds = {kind for name in names for kind in of_names[name]}
            state = self._optimizer.state[flat]
            for kind in [kind for kind in state if kind not in kinds]:
                del state[kind]
            for kind in kinds & shaped:
                if not torch.is_tensor(state.get(kind)):
                    dtype = next(reader.stored[_state(name, kind)].dtype for name in names if kind in of_names[name])
                    state[kind] = torch.zeros_like(flat.data, dtype=dtype)
                elif any(kind not in of_names[name] for name in names):
                    state[kind].zero_()
        for part in self._parts:
            name = self._names[part.param]
            for kind in of_names[name] & shaped if part.numel else ():
                values = self._optimizer.state[self._flats[part.number]][kind]
                wanted[_state(name, kind)].append(_piece(part, values))
        return {
            part.param: _states(reader, name, of_names[name] - shaped)
            for part in self._parts for name in [self._names[part.param]]
        }  # fmt: skip

    def _set_states(self, reader: Reader, scalars: Mapping[torch.nn.Parameter, Mapping[str, object]]) -> None:
        for group, options in zip(self._optimizer.param_groups, self._options(_saved_groups(reader)), strict=True):
            group.update(copy.deepcopy(options))
        group_of = {param: number for number, params in enumerate(self._masters.groups()) for param in params}
        groups = [self._optimizer.param_groups[group_of[param]] for param in scalars]
        made = {
            param: {key: self._as_made(key, value, group) for key, value in of_param.items()}
            for (param, of_param), group in zip(scalars.items(), groups, strict=True)
        }
        if isinstance(self._stepper, WholeStepper):
            for param, states in made.items():
                self._optimizer.state[self._stepper.masters[param]] = states
            return
        self._stepper.load_scalars(made, {part.param: part.number for part in self._parts}, self._flats)
        self._masters.states_made()

    def _as_made(self, key: str, value: object, group: Mapping[str, object]) -> object:
        """Return a state as the torch optimizer makes it: a number or a tensor, on the host or the device."""
        package = type(self._optimizer).__module__.partition(".")[0]
        if package == "torch" and isinstance(value, (int, float)) and not isinstance(value, bool):
            value = torch.tensor(float(value))
        if package == "deepspeed" and key == "step" and torch.is_tensor(value):
            return int(value)
        if not torch.is_tensor(value):
            return value
        on_host = package == "torch" and key == "step" and not (group.get("fused") or group.get("capturable"))
        return value if on_host else value.to(self._flats[0].device)

    def _options(self, saved: Mapping[object, dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the ``saved`` options of each group here; raise if its parameters had different ones."""
        found = []
        for index, params in enumerate(self._masters.groups()):
            names = {self._names[param] for param in params}
            of_group = [options for options in saved.values() if names.intersection(options["params"])]
            plain = [{key: value for key, value in options.items() if key != "params"} for options in of_group]
            if any(options != plain[0] for options in plain):
                raise DamageError(
                    f"parameters of the optimizer's group {index} were in groups with other options. Make the groups as"
                    " then, or load its weights alone: load_optimizer_states=False"
                )
            found.append(plain[0] if plain else {})
        return found

    def read_engine(self, reader: Reader, states: bool, scheduler: bool) -> None:
        """Restore counters and the like, if the checkpoint has them."""
        if (random_state := ("rng", str(self._rank))) in reader.stored and states:
            engine_state.set_random_state(reader.object(random_state), self._engine.device)
        if _ENGINE in reader.stored:
            engine_state.load(self._engine, reader.object(_ENGINE), scheduler, loss_scale=states)


def client_state(reader: Reader) -> dict[str, Any]:
    """Return what the program has saved with the engine; empty if the checkpoint is of another library."""
    if _ENGINE not in reader.stored:
        return {}
    said = reader.object(_ENGINE)["client_state"]
    return dict(torch.load(io.BytesIO(said), map_location="cpu", weights_only=False) if type(said) is bytes else said)


def weights_and_client_state(folder: Path, module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the whole weights of a checkpoint, on the host, by the names of ``module``, and its client state."""
    reader = DCPReader(folder)
    here = {plain_name(name): name for name in module.state_dict(keep_vars=True)}
    names = [key for key in reader.stored if key[0] == "model" and len(key) == 2]
    return {here.get(str(key[1]), str(key[1])): reader.object(key) for key in names}, client_state(reader)


def _piece(part: MasterPart, values: torch.Tensor) -> Piece:
    return Piece(zero3.full_shape(part.param), part.start, values.narrow(0, part.offset, part.numel))


def _state(name: str, kind: str) -> Key:
    return (*_STATES, name, kind)


def _keyed(name: str, states: Mapping[str, Any]) -> dict[Key, Any]:
    return {_state(name, kind): value for kind, value in states.items()}


def _put(content: Content, key: Key, value: object) -> None:
    if torch.is_tensor(value):
        content.add(key, Piece.whole(value))
    else:
        content.objects[key] = value


def _saved_groups(reader: Reader) -> dict[object, dict[str, Any]]:
    groups: dict[Any, dict[str, Any]] = defaultdict(lambda: {"params": []})
    for key in reader.stored:
        if key[:2] == _GROUPS and len(key) == 4:
            groups[key[2]][str(key[3])] = reader.object(key)
    return groups


def _states(reader: Reader, name: str, kinds: set[str]) -> dict[str, object]:
    return {kind: reader.object(_state(name, kind)) for kind in sorted(kinds)}


def _shaped_keys(reader: Reader, shapes: Mapping[str, tuple[int, ...]], of_names: Mapping[str, set[str]]) -> set[str]:
    """Return the states that have one value per element: "step" has none, also of a parameter without dimensions."""
    others = {"step"}
    for name, shape in shapes.items():
        for key in of_names[name]:
            stored = reader.stored[_state(name, key)]
            if stored.dtype is None or stored.shape != shape:
                others.add(key)
    return {key for name in shapes for key in of_names[name]} - others


def _difference(what: str, missing: Sequence[str], unknown: Sequence[str], how: str) -> str:
    parts = [f"it lacks {zero.listed(missing)}"] if missing else []
    parts += [f"only it has {zero.listed(unknown)}"] if unknown else []
    return f"its {what} are others than those here: {' and '.join(parts)}. To load what both have: {how}"
