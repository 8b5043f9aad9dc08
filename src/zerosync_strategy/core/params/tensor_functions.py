"""Which of torch's functions ask a tensor for something that does not depend on its values."""

from __future__ import annotations

from typing import Any

import torch

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


def _functions_of(names: str) -> set[Any]:
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
