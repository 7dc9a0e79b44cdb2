"""The index of a checkpoint's tensors: where each lies, from torch's `.metadata`. Imports no torch.

That file is a pickle, and loading a pickle can run any code. Here its objects become stand-ins that do nothing, and the
file is refused if it names anything but the classes that torch writes into it. Some of these are private:
tests/system/test_torch_internals.py fails when torch writes others.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import re
from typing import Any, NamedTuple, TypeVar

from ebbtide.checkpoint.manifest import MALFORMED, CheckpointFiles, safe_excerpt

TENSORS = "tensors"
METADATA = f"{TENSORS}/.metadata"

Box = tuple[int, ...]
"""A size or an offset in each dimension."""


class StoredPart(NamedTuple):
    """A range of a file with a box of a tensor."""

    offset: Box
    size: Box
    file: str
    """The file's name in the manifest."""
    start: int
    length: int


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint, and where its parts are."""

    dtype: str
    size: Box
    parts: list[StoredPart]


Index = dict[str, StoredTensor]
"""The tensors by name: `model.` or `optimizer.`, and the tensor's own name."""


def read_index(files: CheckpointFiles) -> Index:
    """Reads the index, and checks that all tensors are complete and in files that the manifest lists."""
    data = files.read(METADATA)
    try:
        if odd := {opcode.name for opcode, _, _ in pickletools.genops(data)} - OPCODES:
            raise ValueError(f"it uses {', '.join(sorted(odd))}, which torch does not")
        index = _index(_Unpickler(io.BytesIO(data)).load())
        for name, kept in index.items():
            _check(name, kept, files)
    except MALFORMED as error:
        raise files.damage_error(f"{METADATA} is not what a run writes: {safe_excerpt(str(error))}") from None
    return index


# The opcodes that a pickler writes for these classes. With others, a few bytes can allocate all memory there is.
OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET"),
    *("STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS"),
}
DTYPE = re.compile(r"bool|(b?float|u?int)[0-9]+(_[a-z0-9]+)?")


class _Object:
    """Stands for one of torch's objects: it has the object's fields, and does nothing."""

    fields: Any = None

    def __init__(self, *arguments: object) -> None:
        pass

    def __setstate__(self, fields: Any) -> None:
        self.fields = fields


class _Enum(_Object):
    pass


def _member(kind: object, _: object) -> _Enum:
    """Stands for `getattr`, by which some versions of Python name the member of an enum."""
    if kind is not _Enum:
        raise ValueError("it looks up an attribute")
    return _Enum()


_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
STAND_INS = {
    **{(_METADATA, name): _Object for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")},
    **{(_METADATA, name): _Object for name in ("TensorStorageMetadata", "ChunkStorageMetadata")},
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Enum,
    (_FILES, "_StorageInfo"): _Object,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _Object,
    ("pathlib", "PosixPath"): _Object,
    ("pathlib._local", "PosixPath"): _Object,
    ("builtins", "getattr"): _member,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and DTYPE.fullmatch(name):
            return name
        if (module, name) not in STAND_INS:
            raise ValueError(f"it names {module}.{name}, and loading it would run that code")
        return STAND_INS[module, name]


def _index(metadata: object) -> Index:
    places = {}
    for key, place in _field(metadata, "storage_data", dict).items():
        if _typed(_Object, place).fields.get("transform_descriptors"):
            raise ValueError("its tensors are transformed (compressed?), which no run does")
        start, length = _box((_field(place, "offset", int), _field(place, "length", int)))
        name, offset = _field(key, "fqn", str), _box(_field(key, "offset", tuple))
        places[name, offset] = _field(place, "relative_path", str), start, length
    index = {}
    for name, kept in _field(metadata, "state_dict_metadata", dict).items():
        dtype = _typed(str, _typed(tuple, _field(kept, "properties", _Object).fields)[0])
        parts = []
        for chunk in _field(kept, "chunks", list):
            offset, size = _box(_field(chunk, "offsets", tuple)), _box(_field(chunk, "sizes", tuple))
            if (name, offset) not in places:
                raise ValueError(f"a part of {name} is in no file")
            file, start, length = places[name, offset]
            parts.append(StoredPart(offset, size, f"{TENSORS}/{file}", start, length))
        index[_typed(str, name)] = StoredTensor(dtype, _box(_field(kept, "size", tuple)), parts)
    if not any(name.startswith("model.") for name in index):
        raise ValueError("it has no weights")
    return index


def _check(name: str, kept: StoredTensor, files: CheckpointFiles) -> None:
    for part in kept.parts:
        if part.file not in files:  # names in a manifest are checked to stay within the folder
            raise ValueError(f"{name} is in {part.file}, which the manifest does not list")
        if part.start + part.length > files.manifest.files[part.file].size:
            raise ValueError(f"{name} ends after the end of {part.file}")
        if any(start + size > whole for start, size, whole in zip(part.offset, part.size, kept.size, strict=True)):
            raise ValueError(f"a part of {name} is larger than the whole")
    if sum(math.prod(part.size) for part in kept.parts) != math.prod(kept.size):
        raise ValueError(f"{name} is incomplete")


T = TypeVar("T")


def _field(of: object, name: str, kind: type[T]) -> T:
    fields = _typed(dict, _typed(_Object, of).fields)
    if name not in fields:
        raise ValueError(f"{name} is missing")
    return _typed(kind, fields[name], name)


def _typed(kind: type[T], value: object, name: str = "something") -> T:
    if not isinstance(value, kind):
        raise ValueError(f"{name} has the wrong type")
    return value


def _box(numbers: tuple[object, ...]) -> Box:
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError("a size has the wrong type")
    return numbers  # type: ignore[return-value]
