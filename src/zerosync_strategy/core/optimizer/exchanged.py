"""The step of an optimizer that needs whole parameters on ZeRO-3, which shards each parameter.

Gradients are reduced to the owner of the parameter. After the step, each owner sends every rank its shards of the
stepped parameters: 1/W of the bytes of a gather, in batches of at most a bucket or one parameter.

Owners keep the fp32 master weights from step to step. An edit or a loaded checkpoint changes DeepSpeed's shards of
them. So ranks compare the digests of these shards with the digests after the last step. If one of them differs, all
ranks send their shards to the owners.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from zerosync_strategy.core.comm.collectives import InFlight, largest
from zerosync_strategy.core.comm.journal import phase
from zerosync_strategy.core.comm.nodes import Sent
from zerosync_strategy.core.comm.owners import all_to_all
from zerosync_strategy.core.engine import zero, zero3, zero3_optimizer
from zerosync_strategy.core.engine.zero3 import require_numel
from zerosync_strategy.core.gradients.owned import OwnedLayout
from zerosync_strategy.core.gradients.reducer import Reducer
from zerosync_strategy.core.gradients.stage3 import PerParamShards
from zerosync_strategy.core.optimizer.masters import ShardMasters
from zerosync_strategy.core.optimizer.whole import WholeStepper

_TAG = 2**29  # below the tags of gathers and above the tags of reductions
_IN_FLIGHT = 2

ValuesOf = Callable[[nn.Parameter], torch.Tensor]
Write = Callable[[nn.Parameter, torch.Tensor], None]


class _Batch:
    """Parameters of one layout that are exchanged together."""

    def __init__(self, layout: OwnedLayout, params: Sequence[nn.Parameter]) -> None:
        self._layout = layout
        self._params = sorted(params, key=layout.owners.__getitem__)
        self._owners = [layout.owners[param] for param in self._params]
        self._shard_numels = list(map(zero3.shard_numel, self._params))
        self._of_owners = [0] * layout.world_size  # by owner, elements of one rank's shards of its parameters
        for owner, numel in zip(self._owners, self._shard_numels, strict=True):
            self._of_owners[owner] += numel
        self._own = [param for param in self._params if param in layout.own_offsets]
        self._own_numels = list(map(zero3.shard_numel, self._own))
        self._width = sum(self._own_numels)

    def to_owners(self, shard_of: ValuesOf, take: Write) -> InFlight:
        """Launch the exchange of shards to owners. ``take`` is called with each owned parameter, whole and flat."""
        sent = torch.cat([shard_of(param) for param in self._params])
        received = sent.new_empty(self._layout.world_size * self._width)

        def use(_: object) -> None:
            columns = received.view(self._layout.world_size, self._width).split(self._own_numels, 1)
            for param, shards in zip(self._own, columns, strict=True):
                take(param, shards.reshape(-1)[: zero3.full_numel(param)])

        sizes = [self._width] * self._layout.world_size
        return self._exchange(sent, received, self._of_owners, sizes, "master weights", use)

    def from_owners(self, values_of: ValuesOf, take: Write, like: torch.Tensor) -> InFlight:
        """Launch the exchange of shards from owners. ``take`` is called with this rank's shard of each parameter.

        ``values_of`` returns an owned parameter, whole and flat. ``like`` has the dtype and device.
        """
        sent = like.new_zeros(self._layout.world_size, self._width)
        for param, shards in zip(self._own, sent.split(self._own_numels, 1), strict=True):
            values = values_of(param)
            padding = shards.numel() - values.numel()
            shards.copy_(torch.nn.functional.pad(values, (0, padding)).view_as(shards))
        rank, sizes, of_owners = self._layout.rank, [self._width] * self._layout.world_size, list(self._of_owners)
        if not self._width:  # torch's fake process group, which plans use, takes no empty tensor
            sent, sizes[rank], of_owners[rank] = like.new_zeros(1), 1, 1
        received = like.new_empty(sum(of_owners))

        def use(_: object) -> None:
            parts = list(received.split(of_owners))
            begins = [0] * len(parts)
            for param, owner, numel in zip(self._params, self._owners, self._shard_numels, strict=True):
                begin, begins[owner] = begins[owner], begins[owner] + numel
                take(param, parts[owner][begin : begin + numel])

        return self._exchange(sent.view(-1), received, sizes, of_owners, "updated parameters", use)

    def _exchange(
        self, sent: torch.Tensor, received: torch.Tensor, sent_numels: list[int], received_numels: list[int], what: str,
        use: Callable[[object], None],
    ) -> InFlight:  # fmt: skip
        group, label = self._layout.process_group, f"the exchange of {what} with their owners"
        counts = sent, received, sent_numels, received_numels
        exchange = all_to_all(*counts, group, self._layout.counter, _TAG, label)
        exchange.then(use)
        return exchange


class ExchangedStepper(WholeStepper):
    """Steps whole parameters for the ZeRO-3 optimizer of ``reducer``. Making one is collective.

    ``digest`` returns numbers that differ after a change of a flat tensor.
    """

    def __init__(
        self, reducer: Reducer, shards: PerParamShards, masters: ShardMasters,
        digest: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:  # fmt: skip
        super().__init__(shards, masters)
        self._pipeline, self._shards, self._digest = reducer.pipeline, shards, digest
        self._digests: list[torch.Tensor] = []  # of this rank's shards of the master weights after the last step
        self._batches: list[_Batch] = []
        of_params = masters.by_param()
        self._flats = [master.flat for master in of_params]
        # By parameter, the index of the sub-group and the bounds of this rank's shard in its master weights.
        self._places = {
            param: (index, begin, end) for index, master in enumerate(of_params) for param, begin, end in master.slices
        }
        itemsize = self._flats[0].element_size()
        self._sent = Sent()  # bytes of a rank on average: the shards of all parameters
        for layout in (layout for layout in shards.layouts if isinstance(layout, OwnedLayout)):
            for params in zero.in_chunks(layout.params, reducer.bucket_bytes // itemsize, zero3.full_numel):
                self._batches.append(_Batch(layout, params))
            for param in layout.own_offsets:
                flat = self._flats[self._places[param][0]]
                self.masters[param] = nn.Parameter(flat.new_empty(zero3.full_shape(param)))
            nbytes = sum(map(zero3.shard_numel, layout.params)) * itemsize
            self._sent = self._sent.plus(shards.topology.sent(nbytes, layout.process_group, distinct=True))
        self.take(zero3_optimizer.torch_groups(self._zero))
        self._read_masters()

    # DeepSpeed calls these three for each sub-group. The first or the last call serves all sub-groups.

    def take_gradients(self, index: int) -> None:
        if index == 0:
            for param, _, gradient in self._shards.of_params():
                master = self.masters[param]
                master.grad = None if param in self.left_out else gradient.view_as(master).to(master.dtype)

    @torch.no_grad()
    def scale_gradients(self, index: int, factor: torch.Tensor | float) -> None:
        for gradient in (master.grad for master in self.masters.values()):
            if index == 0 and gradient is not None:
                gradient.mul_(factor)

    def step_group(self, index: int) -> None:
        if index < len(self._flats) - 1:
            return
        self._adopt_edits()
        zero.step_torch_optimizer(self._zero)
        with phase("from_owners"):
            self.give()
        self._pipeline.sent_floor = self._pipeline.sent_floor.plus(self._sent)

    def change(self, change: Callable[[], None]) -> None:
        self._adopt_edits()
        change()
        self.give()

    def read_gradient(self, param: nn.Parameter) -> torch.Tensor:
        """Return the averaged gradient of ``param``, in fp32. Collective."""
        layout = self._shards.layout_of(param)
        return layout.read(self._shards.owned[layout], param)

    def write_gradient(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Set the averaged gradient of ``param``, if this rank owns it."""
        require_numel(value, zero3.full_shape(param))
        layout = self._shards.layout_of(param)
        layout.write(value, self._shards.owned[layout], param)

    def owner(self, param: nn.Parameter) -> tuple[int, dist.ProcessGroup]:
        layout = self._shards.layout_of(param)
        return layout.owners[param], layout.process_group

    @torch.no_grad()
    def give(self) -> None:
        self._exchange(
            batch.from_owners(lambda param: self.masters[param].data.view(-1), self._take_shard, self._flats[0])
            for batch in self._batches
        )
        self._digests = self._digests_now()
        zero3_optimizer.reassign_shards(self._zero)

    @torch.no_grad()
    def _read_masters(self) -> None:
        """Send the ranks' shards of the master weights to the owners. Collective."""
        self._exchange(batch.to_owners(self._master, self._take_master) for batch in self._batches)
        self._digests = self._digests_now()

    def _adopt_edits(self) -> None:
        if self._is_edited():
            with phase("to_owners"):
                self._read_masters()

    def _is_edited(self) -> bool:
        """Return whether a rank's shard of the master weights has changed since the last step. Collective."""
        changed = [now.ne(before).any() for now, before in zip(self._digests_now(), self._digests, strict=True)]
        group = zero.data_parallel_group(self._zero)
        return bool(largest([int(torch.stack(changed).any())], group)[0])

    def _digests_now(self) -> list[torch.Tensor]:
        return [self._digest(flat.data) for flat in self._flats]

    @torch.no_grad()
    def _exchange(self, exchanges: Iterator[InFlight]) -> None:
        in_flight: deque[InFlight] = deque()
        for exchange in exchanges:
            in_flight.append(exchange)
            if len(in_flight) == _IN_FLIGHT:
                in_flight.popleft().wait()
        for exchange in in_flight:
            exchange.wait()

    def _master(self, param: nn.Parameter) -> torch.Tensor:
        index, begin, end = self._places[param]
        return self._flats[index].data[begin:end]

    def _take_master(self, param: nn.Parameter, values: torch.Tensor) -> None:
        self.masters[param].data.view(-1).copy_(values)

    def _take_shard(self, param: nn.Parameter, shard: torch.Tensor) -> None:
        self._master(param).copy_(shard)
