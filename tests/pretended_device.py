"""A device that a CPU pretends to have, and that notes each time at which a GPU would make its host wait.

Tensors that a recipe sends to `accelerator.device`, and all that is computed from them, are `OnDevice`: their values
lie on the CPU, but their device is `meta`. `Pretended` computes what torch is asked to do with them.
"""

import contextlib
import sys
import traceback
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, PartialState
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from common import launch
from runs import REPOSITORY

DEVICE = torch.device("meta")
# They give the host a value, or a tensor whose size is decided by values.
READS = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "argwhere"),
    *("masked_select", "masked_scatter_backward", "_is_all_true", "_is_any_true", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive"),
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
INDEXING |= {"_unsafe_index", "_unsafe_index_put"}


class OnDevice(torch.Tensor):
    """A tensor of the pretended device; `inner` holds its values on the CPU."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )

    def __init__(self, inner):
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of `Pretended`")

    def __getitem__(self, index):
        # torch would make the index of a list of nothing. On a GPU it copies it there, and waits.
        parts = list(index) if isinstance(index, tuple) else [index]
        for place, part in enumerate(parts):
            if isinstance(part, list):
                parts[place] = torch.tensor(part, dtype=torch.long).to(DEVICE)
        return super().__getitem__(tuple(parts))

    def tolist(self):
        return self.detach().cpu().tolist()

    def __repr__(self, **_):
        return f"OnDevice({self.inner})"


def is_plain(value) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, OnDevice)


class Pretended(TorchDispatchMode):
    """Runs what is asked of the pretended device."""

    def __init__(self):
        super().__init__()
        self.waits: list[str] = []

    def wait(self, reason: str) -> None:
        own = [frame for frame in traceback.extract_stack() if is_own(frame.filename)]
        place = f"{Path(own[-1].filename).name}:{own[-1].lineno} {own[-1].line}" if own else "?"
        self.waits.append(f"{reason} in {place}")

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """In the place of `Tensor.pin_memory`, for which torch wants a GPU."""
        assert not isinstance(tensor, OnDevice), "only memory of the host can be pinned"
        pinned = tensor.clone()
        pinned.pretended_pinned = True
        return pinned

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        reads_device = any(isinstance(leaf, OnDevice) for leaf in leaves)
        device = kwargs.get("device")
        makes_device = device is not None and torch.device(device).type == DEVICE.type
        if not reads_device and not makes_device:
            return func(*args, **kwargs)

        empty = [leaf for leaf in filter(is_plain, leaves) if leaf.device == DEVICE]
        assert not empty, f"{func}: a tensor without values, made past this class"

        name = func.overloadpacket.__name__
        if name == "_to_copy":
            return self.copy(func, args, kwargs, to_device=device is None or makes_device)
        if name == "copy_":
            self.copy_into(*args, **kwargs)
        elif name in READS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.wait(name)
        elif name in INDEXING:
            self.check_indices(name, args[1])
        else:
            for leaf in filter(is_plain, leaves):
                # A single number of the host goes along with the kernel; `where` copies it.
                assert leaf.dim() == 0, f"{func}: a tensor of the host among the device's"
                if name == "where":
                    self.wait("where")

        if makes_device:
            kwargs["device"] = torch.device("cpu")
        inner_args, inner_kwargs = tree_map(
            lambda leaf: leaf.inner if isinstance(leaf, OnDevice) else leaf, (args, kwargs)
        )
        result = func(*inner_args, **inner_kwargs)
        if device is not None and not makes_device:
            return result
        wrapped = tree_map(lambda leaf: OnDevice(leaf) if is_plain(leaf) else leaf, result)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)

    def copy(self, func, args, kwargs, to_device: bool):
        (tensor,) = args
        self.check_copy(tensor, to_device, kwargs.get("non_blocking", False))
        kwargs |= {"device": torch.device("cpu"), "non_blocking": False}
        result = func(tensor.inner if isinstance(tensor, OnDevice) else tensor, **kwargs)
        return OnDevice(result) if to_device else result

    def copy_into(self, target, source, non_blocking=False) -> None:
        self.check_copy(source, isinstance(target, OnDevice), non_blocking)

    def check_copy(self, tensor, to_device: bool, non_blocking: bool) -> None:
        if isinstance(tensor, OnDevice):
            if not to_device:
                self.wait("a copy to the host")
        elif to_device and not non_blocking:
            self.wait("a blocking copy to the device")
        elif to_device and not hasattr(tensor, "pretended_pinned"):
            self.wait("a copy of memory that is not pinned")

    def check_indices(self, name: str, indices) -> None:
        for index in tree_leaves(indices):
            if is_plain(index):
                self.wait(f"{name} by a tensor of the host")
            elif isinstance(index, OnDevice) and index.dtype in (torch.bool, torch.uint8):
                self.wait(f"{name} by a bool tensor")


def is_own(file: str) -> bool:
    path = Path(file)
    return path.is_relative_to(REPOSITORY) and path.parent.name != "tests"


@contextlib.contextmanager
def device(monkeypatch):
    """Lets torch and recipes work with the pretended device inside the block; gives the `Pretended`."""
    mode = Pretended()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: mode.pin(tensor))
        # A `SharedMask` takes part in no operation; only what it holds does.
        inner_of = lambda tensor: tensor.inner if isinstance(tensor, OnDevice) else tensor
        as_subclass = torch.Tensor.as_subclass
        patch.setattr(
            torch.Tensor, "as_subclass", lambda tensor, kind: as_subclass(inner_of(tensor), kind)
        )
        # torch knows no autocast for this device. These runs are in fp32 and need none.
        is_enabled, init = torch.is_autocast_enabled, torch.autocast.__init__
        known = lambda name: "cpu" if str(name) == DEVICE.type else name
        patch.setattr(torch, "is_autocast_enabled", lambda *names: is_enabled(*map(known, names)))
        patch.setattr(
            torch.autocast,
            "__init__",
            lambda self, name, *args, **kwargs: init(self, known(name), *args, **kwargs),
        )
        # torch has a list of the devices with a fused AdamW.
        patch.setattr(
            sys.modules["torch.optim.adam"],
            "_device_dtype_check_for_fused",
            lambda *args, **_: None,
        )
        # Models are read into memory of the host, and `meta` means there what it always does.
        read = PreTrainedModel.from_pretrained.__func__

        def from_pretrained(cls, *args, **kwargs):
            with _disable_current_modes():
                return read(cls, *args, **kwargs)

        patch.setattr(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))
        # torch would make it of nothing, without asking `Pretended`. At the first `with torch.device(...)`
        # of a process it lists, for good, the functions that this concerns. The list must hold the
        # real one: by it transformers knows that a model without memory has no values yet.
        _device_constructors()
        tensor = torch.tensor

        def sent_there(data, *, device=None, **settings):
            made = tensor(data, **settings)
            return made if device is None else made.to(device)

        patch.setattr(torch, "tensor", sent_there)
        make_accelerator = launch.make_accelerator

        def make_there(*args):
            accelerator = make_accelerator(*args)
            for state in (AcceleratorState, PartialState):
                patch.setitem(state._shared_state, "device", DEVICE)
            return accelerator

        patch.setattr(launch, "make_accelerator", make_there)
        before = torch.__future__.get_swap_module_params_on_conversion()
        # `Module.to` then moves each parameter itself, which others share or hold.
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            with mode:
                yield mode
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)
