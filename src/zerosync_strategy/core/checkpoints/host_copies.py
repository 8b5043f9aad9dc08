"""Copies of what a checkpoint has, in host memory that is kept for the next one."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from zerosync_strategy.core.checkpoints.pieces import Content, Key, Piece

_ALIGNMENT = 64


class HostCopies:
    """Host memory for one content at a time, pinned if the values are on a device.

    :attr:`nbytes`: what is kept.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    @torch.no_grad()
    def of(self, content: Content) -> Content:
        """Return a copy of ``content``, complete on return. The tensors of the copy before are overwritten."""
        pieces = [piece for of_key in content.tensors.values() for piece in of_key]
        devices = {piece.values.device for piece in pieces if piece.values.device.type != "cpu"}
        self._make_room(bytes_of(content), pinned=bool(devices))
        streams = {device: torch.Stream(device) for device in devices}
        for device, stream in streams.items():
            stream.wait_stream(torch.accelerator.current_stream(device))
        begin = 0
        copies: dict[Key, list[Piece]] = {}
        for key, of_key in content.tensors.items():
            copies[key] = []
            for piece in of_key:
                end = begin + piece.values.nbytes
                values = self._memory[begin:end].view(piece.values.dtype)
                begin += _room(piece)
                self._copy(values, piece, streams.get(piece.values.device))
                copies[key].append(replace(piece, values=values))
        for stream in streams.values():
            stream.synchronize()
        return replace(content, tensors=copies, objects=copy.deepcopy(content.objects))

    def _make_room(self, nbytes: int, pinned: bool) -> None:
        if self.nbytes < nbytes or self._memory.is_pinned() != pinned:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free it first
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)

    @staticmethod
    def _copy(target: torch.Tensor, piece: Piece, stream: torch.Stream | None) -> None:
        values = piece.values.reshape(-1)
        if stream is None:
            target.copy_(values)
            return
        with stream:
            target.copy_(values, non_blocking=True)


def bytes_of(content: Content) -> int:
    """Return the host memory that a copy of ``content`` takes."""
    return sum(_room(piece) for of_key in content.tensors.values() for piece in of_key)


def _room(piece: Piece) -> int:
    return -(-piece.values.nbytes // _ALIGNMENT) * _ALIGNMENT
