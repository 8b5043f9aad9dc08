"""The step of an optimizer that needs whole parameters on ZeRO-3, which cuts each into shards.

Gradients are reduced into shards as ever. Before the step, ranks send their shards of each gradient to the rank that
owns the parameter; after it, owners send back the shards of what they have stepped: 1/W of what the gradients and the
parameters cost anyway. It goes in batches, none larger than a bucket or a parameter.

Owners keep the fp32 master weights from step to step. What else changes them - an edit, a checkpoint - changes
DeepSpeed's shards of them. So ranks compare digests of these with those after the last step; where one is another, all
send their shards of the weights, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zerosync_strategy.core.comm.collectives import InFlight, largest, phase
from zerosync_strategy.core.comm.owners import all_to_all, choose_owners
from zerosync_strategy.core.engine import zero, zero3, zero3_optimizer
from zerosync_strategy.core.gradients.stage3 import PerParamLayout, Stage3Reducer
from zerosync_strategy.core.optimizer.whole import WholeStep

_TAG = 2**29  # below those of gathers and above those of reductions
_IN_FLIGHT = 2

Read = Callable[[Any], torch.Tensor]
Write = Callable[[Any, torch.Tensor], None]


class _Batch:
    """Parameters of one layout that are exchanged at a time.

    Args:
        owners: of all parameters.
    """

    def __init__(self, layout: PerParamLayout, params: Sequence[Any], owners: dict[Any, int]) -> None:
        self._layout = layout
        self._params = sorted(params, key=owners.__getitem__)
        self._owners = [owners[param] for param in self._params]
        self._shard_numels = [layout.shard_numels[param] for param in self._params]
        self._of_owners = [0] * layout.world_size  # elements of a rank's shards of what each owns
        for param, numel in zip(self._params, self._shard_numels, strict=True):
            self._of_owners[owners[param]] += numel
        self._own = [param for param in self._params if owners[param] == layout.rank]
        self._own_numels = [layout.shard_numels[param] for param in self._own]
        self._width = sum(self._own_numels)

    def to_owners(self, shard_of: Read, take: Write, what: str) -> InFlight:
        """Begin to send each owner the shards of its parameters; ``take`` has each, whole and flat, on its owner."""
        sent = torch.cat([shard_of(param) for param in self._params])
        received = sent.new_empty(self._layout.world_size * self._width)

        def use(_: Any) -> None:
            columns = received.view(self._layout.world_size, self._width).split(self._own_numels, 1)
            for param, shards in zip(self._own, columns, strict=True):
                take(param, shards.reshape(-1)[: zero3.full_numel(param)])

        exchange = self._exchange(sent, received, self._of_owners, [self._width] * self._layout.world_size, what)
        exchange.then(use)
        return exchange

    def from_owners(self, values_of: Read, take: Write, like: torch.Tensor) -> InFlight:
        """Begin to send the shards of parameters from their owners; ``take`` has this rank's shard of each.

        Args:
            values_of: a parameter on its owner, whole and flat.
            like: a tensor of the dtype and the device.
        """
        sent = like.new_zeros(self._layout.world_size, self._width)
        for param, shards in zip(self._own, sent.split(self._own_numels, 1), strict=True):
            values = values_of(param)
            padding = shards.numel() - values.numel()
            shards.copy_(torch.nn.functional.pad(values, (0, padding)).view_as(shards))
        rank, sizes, of_owners = self._layout.rank, [self._width] * self._layout.world_size, list(self._of_owners)
        if not self._width:  # torch's fake process group takes no empty tensor: a plan would end here
            sent, sizes[rank], of_owners[rank] = like.new_zeros(1), 1, 1
        received = like.new_empty(sum(of_owners))

        def use(_: Any) -> None:
            parts = list(received.split(of_owners))
            begins = [0] * len(parts)
            for param, owner, numel in zip(self._params, self._owners, self._shard_numels, strict=True):
                begin, begins[owner] = begins[owner], begins[owner] + numel
                take(param, parts[owner][begin : begin + numel])

        exchange = self._exchange(sent.view(-1), received, sizes, of_owners, "updated parameters")
        exchange.then(use)
        return exchange

    def _exchange(
        self, sent: torch.Tensor, received: torch.Tensor, sent_numels: list[int], received_numels: list[int], what: str
    ) -> InFlight:
        label = f"the exchange of {what} with their owners"
        return all_to_all(sent, received, sent_numels, received_numels, self._layout.process_group, _TAG, label)


class ExchangedStep(WholeStep):
    """Steps whole parameters for the ZeRO-3 optimizer that ``reducer`` reduces for. Collective.

    Args:
        digest: returns numbers that tell whether a flat tensor has changed.

    Attributes:
        owners: of each parameter, in the process group that shards it.
    """

    def __init__(self, reducer: Stage3Reducer, digest: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(reducer)
        self._digest = digest
        self._digests: list[torch.Tensor] = []  # of this rank's shards of the master weights after the last step
        self._gradients: list[torch.Tensor | None] = []
        self.owners: dict[Any, int] = {}
        self._batches: list[_Batch] = []
        optimizer = reducer.optimizer
        masters = reducer.master_shards()
        self._flats = [master.flat for master in masters]
        # Where in the master weights of which sub-group this rank's shard of each parameter is.
        self._places = {
            param: (index, begin, end) for index, master in enumerate(masters) for param, begin, end in master.slices
        }
        groups, cost = zero3_optimizer.torch_groups(optimizer), reducer.step_cost
        options = {
            param: of_group
            for params, of_group in zip(groups, self._optimizer.param_groups, strict=True)
            for param in params
        }
        for layout in reducer.layouts:
            described = [(zero3.full_shape(param), options[param]) for param in layout.params]
            self.owners |= zip(layout.params, choose_owners(described, cost, layout.process_group), strict=True)
            for params in _in_batches(layout.params, reducer.bucket_bytes // self._flats[0].element_size()):
                self._batches.append(_Batch(layout, params, self.owners))
            for param in layout.params:
                if self.owners[param] == layout.rank:
                    flat = self._flats[self._places[param][0]]
                    self.masters[param] = torch.nn.Parameter(flat.new_empty(zero3.full_shape(param)))
        # What one rank sends to owners and back: its shards of all parameters, twice.
        itemsize = self._flats[0].element_size()
        self._sent = [
            reducer.topology.sent(2 * layout.shard_numel * itemsize, layout.process_group, distinct=True)
            for layout in reducer.layouts
        ]
        self.take(groups)
        self._read_masters()

    def step_group(self, index: int) -> None:
        """DeepSpeed has the gradients of a sub-group ready; with those of the last one, step. Collective."""
        optimizer = self._reducer.optimizer
        if index == 0:
            self._gradients = [None] * len(self._flats)
        self._gradients[index] = self._flats[index].grad
        if index < len(self._flats) - 1:
            return
        with phase("to_owners"):
            if self._is_edited():
                self._read_masters()
            self._exchange(batch.to_owners(self._gradient, self._take_gradient, "gradients") for batch in self._batches)
        self._gradients = []
        zero.step_torch_optimizer(optimizer)
        with phase("from_owners"):
            self.give()
        for sent in self._sent:
            self._reducer.pipeline.sent_floor = self._reducer.pipeline.sent_floor.plus(sent)

    def change(self, change: Callable[[], None]) -> None:
        if self._is_edited():
            self._read_masters()
        change()
        self.give()

    def owner(self, param: Any) -> tuple[int, Any]:
        return self.owners[param], zero3.process_group(param)

    @torch.no_grad()
    def give(self) -> None:
        self._exchange(
            batch.from_owners(lambda param: self.masters[param].data.view(-1), self._take_shard, self._flats[0])
            for batch in self._batches
        )
        self._digests = [self._digest(flat.data) for flat in self._flats]
        zero3_optimizer.reassign_shards(self._reducer.optimizer)

    @torch.no_grad()
    def _read_masters(self) -> None:
        """Let owners have the master weights of which ranks have shards. Collective."""
        self._exchange(batch.to_owners(self._master, self._take_master, "master weights") for batch in self._batches)
        self._digests = [self._digest(flat.data) for flat in self._flats]

    def _is_edited(self) -> bool:
        """Return whether a rank's shard of the master weights is another than after the last step. Collective."""
        changed = [
            self._digest(flat.data).ne(before).any() for flat, before in zip(self._flats, self._digests, strict=True)
        ]
        group = zero.data_parallel_group(self._reducer.optimizer)
        return bool(largest([int(torch.stack(changed).any())], group)[0])

    @torch.no_grad()
    def _exchange(self, exchanges: Iterator[InFlight]) -> None:
        in_flight: deque[InFlight] = deque()
        for exchange in exchanges:
            in_flight.append(exchange)
            if len(in_flight) == _IN_FLIGHT:
                in_flight.popleft().wait()
        for exchange in in_flight:
            exchange.wait()

    def _gradient(self, param: Any) -> torch.Tensor:
        index, begin, end = self._places[param]
        gradient = self._gradients[index]
        assert gradient is not None
        return gradient[begin:end]

    def _take_gradient(self, param: Any, gradient: torch.Tensor) -> None:
        master = self.masters[param]
        master.grad = None if param in self.left_out else gradient.view_as(master).clone()

    def _master(self, param: Any) -> torch.Tensor:
        index, begin, end = self._places[param]
        return self._flats[index].data[begin:end]

    def _take_master(self, param: Any, values: torch.Tensor) -> None:
        self.masters[param].data.view(-1).copy_(values)

    def _take_shard(self, param: Any, shard: torch.Tensor) -> None:
        self._master(param).copy_(shard)


def _in_batches(params: Sequence[Any], numel: int) -> Iterator[list[Any]]:
    """Yield ``params`` in parts of at most so many elements, or of one parameter."""
    part: list[Any] = []
    room = numel
    for param in params:
        room -= zero3.full_numel(param)
        if part and room < 0:
            yield part
            part, room = [], numel - zero3.full_numel(param)
        part.append(param)
    if part:
        yield part
