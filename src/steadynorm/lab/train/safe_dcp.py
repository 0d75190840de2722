"""Read DCP's folders without trusting them.

torch unpickles the index and all values that are not tensors, which could run code. Here the index may only name DCP's
own plain classes, and values are loaded with weights_only=True.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

_PLAIN = {  # classes in an index, all of them plain data
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "device", "strided"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
    "collections": {"OrderedDict"},
    "builtins": {"set", "frozenset"},
}  # fmt: skip


class _Index(pickle.Unpickler):  # noqa: TID251
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and name not in _PLAIN.get(module, ()):
            raise pickle.UnpicklingError(f"names {module}.{name}, which has no place in a checkpoint")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """DCP's reader with an index that cannot run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index."""
        index = _Index(io.BytesIO((Path(self.path) / ".metadata").read_bytes())).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError(f"the index is a {type(index).__name__}")
        meta = getattr(index, "storage_meta", None) or StorageMeta()
        meta.load_id, index.storage_meta = self.load_id, meta
        return index


class Planner(DefaultLoadPlanner):
    """DCP's planner with values that cannot run code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value that is not a tensor."""
        assert read_item.type == LoadItemType.BYTE_IO
        plain, again = torch.load(value, weights_only=True), io.BytesIO()  # noqa: TID251
        torch.save(plain, again)
        again.seek(0)
        super().load_bytes(read_item, again)
