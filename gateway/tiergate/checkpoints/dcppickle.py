"""The machine for the pickles that torch.distributed.checkpoint writes. Pure.

A pickle is a program: whoever can write to the bucket would run code in the gateway. So it is read by a machine of
our own for the few instructions that pickle writes for such data (protocols 4 and 5). It imports nothing and calls
nothing: names outside the tables below are refused, those in them become labels, dictionaries become lists of pairs
(nothing is hashed). What it makes is bounded by the length of the file, and nothing in it recurs.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tiergate.errors import TiergateError

STACK_LIMIT_COUNT = 65_536
BYTES_PER_OBJECT = 5
"""So many bytes of the file at least for each object it makes: torch's own files have eight and more."""
FIRST_OBJECTS_COUNT = 1_000


class MetadataError(TiergateError):
    """It is no such list, or one that does what such a list never does."""


def load(data: bytes) -> object:
    """What the pickle makes, of stand-ins.

    Raises:
        MetadataError: it is cut off, or does what no such list does.
    """
    return _Machine(data).run()


_METADATA = "torch.distributed.checkpoint.metadata"
_OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"  # Of older versions
_FILES = "torch.distributed.checkpoint.filesystem"
_PLANNER = "torch.distributed.checkpoint.planner"  # Megatron keeps the plans of all ranks in the list
_TIERED = "amzn_sagemaker_checkpointing.checkpointing.filesystem.storage_info"

CLASSES: Final = {
    (_METADATA, "Metadata"): "Metadata",
    (_METADATA, "MetadataIndex"): "MetadataIndex",
    (_METADATA, "TensorStorageMetadata"): "TensorStorageMetadata",
    (_METADATA, "BytesStorageMetadata"): "BytesStorageMetadata",
    (_METADATA, "ChunkStorageMetadata"): "ChunkStorageMetadata",
    (_METADATA, "TensorProperties"): "TensorProperties",
    (_METADATA, "StorageMeta"): "StorageMeta",
    (_OLD_METADATA, "TensorProperties"): "TensorProperties",
    (_PLANNER, "SavePlan"): "SavePlan",
    (_PLANNER, "WriteItem"): "WriteItem",
    (_PLANNER, "TensorWriteData"): "TensorWriteData",
    (_PLANNER, "BytesIOWriteData"): "BytesIOWriteData",
    (_FILES, "_StoragePrefix"): "StoragePrefix",
    (_FILES, "_StorageInfo"): "StorageInfo",
    (_TIERED, "_SageMakerStorageInfo"): "TieredStorageInfo",
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): "Metadata",
}
"""What may be built: an object with a state that is looked at."""

CALLS: Final = {
    ("torch", "Size"): "Size",
    ("torch.serialization", "_get_layout"): "layout",
    (_METADATA, "_MEM_FORMAT_ENCODING"): "memory format",
    (_OLD_METADATA, "MEM_FORMAT_ENCODING"): "memory format",
    (_PLANNER, "WriteItemType"): "kind of write",
    ("collections", "OrderedDict"): "dict",
    ("pathlib", "PosixPath"): "path",
    ("pathlib", "PurePosixPath"): "path",
    ("pathlib", "WindowsPath"): "path",
    ("pathlib._local", "PosixPath"): "path",
    ("pathlib._local", "WindowsPath"): "path",
}
"""What may be called: the call is noted, not made."""

_DTYPE = re.compile(r"(b?float|u?int|complex|qu?int|bits)\d\w{0,16}|bool")


@dataclass(slots=True)
class Built:
    """Stands for an object or the result of a call: `what` it is of and what it was made from."""

    what: str
    state: object = None


@dataclass(frozen=True, slots=True)
class Name:
    """Stands for a class, a function or a dtype."""

    what: str
    is_class: bool = False
    is_call: bool = False


class Pairs(list[tuple[object, object]]):
    """Stands for a dictionary."""


class _Machine:
    """Carries out the instructions. Whatever it meets, it ends within as many steps as there are bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[object] = []
        self._marks: list[int] = []
        self._memo: list[object] = []
        self._objects_left = FIRST_OBJECTS_COUNT + len(data) // BYTES_PER_OBJECT

    def run(self) -> object:
        """What the pickle makes."""
        data, stack, steps = self._data, self._stack, _STEPS
        try:
            while (code := data[self._at]) != _STOP:
                self._at += 1
                steps[code](self)
                if len(stack) > STACK_LIMIT_COUNT:
                    raise MetadataError(f"too much at once before byte {self._at}")
        except IndexError:
            raise MetadataError("it is cut off" if self._at >= len(data) else "it takes what is not there") from None
        except KeyError:
            raise MetadataError(f"unknown instruction {data[self._at - 1]} at byte {self._at - 1}") from None
        if len(stack) != 1 or self._marks:
            raise MetadataError("it ends in the middle")
        return stack[0]

    def _take(self, length: int) -> bytes:
        end = self._at + length
        taken = self._data[self._at : end]
        if len(taken) != length:
            raise MetadataError("it is cut off")
        self._at = end
        return taken

    def _number(self, length: int) -> int:
        return int.from_bytes(self._take(length), "little")

    def _pop(self) -> object:
        if self._marks and len(self._stack) <= self._marks[-1]:
            raise MetadataError("it takes what is not there")
        return self._stack.pop()

    def _top(self) -> object:
        if self._marks and len(self._stack) <= self._marks[-1]:
            raise MetadataError("it takes what is not there")
        return self._stack[-1]

    def _pop_mark(self) -> list[object]:
        start = self._marks.pop()
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def _make(self, made: object) -> None:
        self._objects_left -= 1
        if self._objects_left < 0:
            raise MetadataError("it makes more objects than its length allows")
        self._stack.append(made)

    def protocol(self) -> None:
        if (protocol := self._number(1)) not in (4, 5):
            raise MetadataError(f"pickle protocol {protocol}")

    def frame(self) -> None:
        self._take(8)

    def mark(self) -> None:
        self._marks.append(len(self._stack))
        if len(self._marks) > STACK_LIMIT_COUNT:
            raise MetadataError("too much at once")

    def memoize(self) -> None:
        self._memo.append(self._stack[-1])

    def get(self) -> None:
        self._stack.append(self._memo[self._data[self._at]])
        self._at += 1

    def get_far(self) -> None:
        self._stack.append(self._memo[self._number(4)])

    def put_none(self) -> None:
        self._stack.append(None)

    def put_true(self) -> None:
        self._stack.append(True)

    def put_false(self) -> None:
        self._stack.append(False)

    def int1(self) -> None:
        self._stack.append(self._data[self._at])
        self._at += 1

    def int2(self) -> None:
        self._stack.append(self._number(2))

    def int4(self) -> None:
        self._make(int.from_bytes(self._take(4), "little", signed=True))

    def long1(self) -> None:
        self._make(int.from_bytes(self._take(self._number(1)), "little", signed=True))

    def float8(self) -> None:
        self._take(8)
        self._stack.append(0.0)  # Nothing that is looked at has one.

    def text1(self) -> None:
        self._text(self._number(1))

    def text4(self) -> None:
        self._text(self._number(4))

    def bytes1(self) -> None:
        self._make(self._take(self._number(1)))

    def bytes4(self) -> None:
        self._make(self._take(self._number(4)))

    def _text(self, length: int) -> None:
        try:
            self._make(self._take(length).decode())
        except UnicodeDecodeError:
            raise MetadataError("a text is not UTF-8") from None

    def empty_tuple(self) -> None:
        self._stack.append(())

    def tuple1(self) -> None:
        self._make((self._pop(),))

    def tuple2(self) -> None:
        second, first = self._pop(), self._pop()
        self._make((first, second))

    def tuple3(self) -> None:
        third, second, first = self._pop(), self._pop(), self._pop()
        self._make((first, second, third))

    def tuple_marked(self) -> None:
        self._make(tuple(self._pop_mark()))

    def empty_list(self) -> None:
        self._make([])

    def empty_dict(self) -> None:
        self._make(Pairs())

    def append(self) -> None:
        added = self._pop()
        self._list().append(added)

    def appends(self) -> None:
        added = self._pop_mark()
        self._list().extend(added)

    def _list(self) -> list[object]:
        onto = self._top()
        if type(onto) is not list:
            raise MetadataError("it appends to what is no list")
        return onto

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._pairs().append((key, value))

    def set_items(self) -> None:
        taken = self._pop_mark()
        if len(taken) % 2:
            raise MetadataError("a key has no value")
        self._pairs().extend(zip(taken[::2], taken[1::2], strict=True))

    def _pairs(self) -> Pairs:
        onto = self._top()
        if type(onto) is not Pairs:
            raise MetadataError("it sets an item of what is no dictionary")
        return onto

    def global_name(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise MetadataError("a name is no text")
        if what := CLASSES.get((module, name)):
            self._make(Name(what, is_class=True))
        elif what := CALLS.get((module, name)):
            self._make(Name(what, is_call=True))
        elif module == "torch" and _DTYPE.fullmatch(name):
            self._make(f"torch.{name}")
        else:
            raise MetadataError(f"it names {module[:80]}.{name[:80]}, which no such list needs")

    def new_object(self) -> None:
        arguments, what = self._pop(), self._pop()
        if not isinstance(what, Name) or not what.is_class or arguments != ():
            raise MetadataError("it makes an object of what is no class")
        self._make(Built(what.what))

    def call(self) -> None:
        arguments, what = self._pop(), self._pop()
        if not isinstance(what, Name) or not what.is_call or type(arguments) is not tuple:
            raise MetadataError("it calls what is no function")
        self._make(Pairs() if what.what == "dict" else Built(what.what, arguments))

    def build(self) -> None:
        state, built = self._pop(), self._top()
        if not isinstance(built, Built) or built.state is not None:
            raise MetadataError("it sets the state of what has none")
        built.state = state


_STOP: Final = ord(".")

_STEPS: Final[dict[int, Callable[[_Machine], None]]] = {
    0x80: _Machine.protocol,
    0x95: _Machine.frame,
    0x94: _Machine.memoize,
    ord("h"): _Machine.get,
    ord("j"): _Machine.get_far,
    ord("("): _Machine.mark,
    ord("N"): _Machine.put_none,
    0x88: _Machine.put_true,
    0x89: _Machine.put_false,
    ord("K"): _Machine.int1,
    ord("M"): _Machine.int2,
    ord("J"): _Machine.int4,
    0x8A: _Machine.long1,
    ord("G"): _Machine.float8,
    0x8C: _Machine.text1,
    ord("X"): _Machine.text4,
    ord("C"): _Machine.bytes1,
    ord("B"): _Machine.bytes4,
    ord(")"): _Machine.empty_tuple,
    0x85: _Machine.tuple1,
    0x86: _Machine.tuple2,
    0x87: _Machine.tuple3,
    ord("t"): _Machine.tuple_marked,
    ord("]"): _Machine.empty_list,
    ord("a"): _Machine.append,
    ord("e"): _Machine.appends,
    ord("}"): _Machine.empty_dict,
    ord("s"): _Machine.set_item,
    ord("u"): _Machine.set_items,
    0x93: _Machine.global_name,
    0x81: _Machine.new_object,
    ord("R"): _Machine.call,
    ord("b"): _Machine.build,
}
"""The instructions, as the module `pickletools` names them, that pickle writes for such data."""
