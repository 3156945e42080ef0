"""Messages that are nearly right: fields of valid ones set to extremes, or their bytes damaged."""

from __future__ import annotations

import math
import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

FLOATS = (0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 5e-324, 1e-39, 1e-9, 1e-6, 0.5, 2.0, 3600.0)
FLOATS += (1e9, 1e38, 1e300)
INTEGERS = (0, 1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 1023, 1024, 4095, 4096, 4097, 2**16, 2**24)
EDGES = (2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
TEXTS = ("", "a", "\0", " ", "ü" * 64, "x" * 128, "x" * 129, "\ud7ff\uffff", "<|endoftext|>", "a\u202eb", "𝄞" * 9)
MOST = {
    FieldDescriptor.CPPTYPE_INT32: 2**31 - 1,
    FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1,
    FieldDescriptor.CPPTYPE_INT64: 2**63 - 1,
    FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1,
    FieldDescriptor.CPPTYPE_ENUM: 2**31 - 1,
}
FLOAT32_MOST = 3.4e38


def value(field: FieldDescriptor, dice: random.Random) -> Any:
    """Something that the field's type can hold."""
    kind = field.cpp_type
    if kind in MOST:
        return min(dice.choice(INTEGERS if dice.random() < 0.7 else EDGES), MOST[kind])
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        number = dice.choice(FLOATS)
        return math.inf if kind == FieldDescriptor.CPPTYPE_FLOAT and FLOAT32_MOST < number < math.inf else number
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return dice.random() < 0.5
    text = dice.choice(TEXTS)
    return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text


def mutate(message: Message, dice: random.Random) -> None:
    """Change one field, here or further within."""
    field = dice.choice(message.DESCRIPTOR.fields)
    if dice.random() < 0.1:
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        getattr(message, field.name)[value(entry["key"], dice)] = value(entry["value"], dice)
    elif field.message_type is not None:
        mutate(_inner(message, field, dice), dice)
    elif field.is_repeated:
        items = getattr(message, field.name)
        if items and dice.random() < 0.5:
            items[dice.randrange(len(items))] = value(field, dice)
        else:
            items.extend(value(field, dice) for _ in range(dice.choice((1, 1, 2, 70))))
    else:
        setattr(message, field.name, value(field, dice))


def _inner(message: Message, field: FieldDescriptor, dice: random.Random) -> Message:
    inner = getattr(message, field.name)
    if not field.is_repeated:
        return inner
    if inner and dice.random() < 0.8:
        return inner[dice.randrange(len(inner))]
    return inner.add()


def damaged(message: bytes, dice: random.Random) -> bytes:
    """The message with some bytes flipped, cut off or repeated."""
    data = bytearray(message or b"\0")
    for _ in range(dice.randint(1, 4)):
        kind, where = dice.randrange(4), dice.randrange(len(data))
        if kind == 0:
            data[where] = dice.randrange(256)
        elif kind == 1:
            del data[where:]
        elif kind == 2:
            data[where:where] = data[: dice.randrange(len(data) + 1)]
        else:
            data += bytes(dice.randrange(256) for _ in range(dice.randrange(20)))
        data = data or bytearray(b"\0")
    return bytes(data)


def mutant(valid: Message, dice: random.Random) -> Message | None:
    """A changed copy; None if its damaged bytes are not a message any more."""
    copy = type(valid)()
    copy.CopyFrom(valid)
    for _ in range(dice.choice((1, 1, 1, 2, 3, 6))):
        mutate(copy, dice)
    if dice.random() < 0.7:
        return copy
    try:
        return type(valid).FromString(damaged(copy.SerializeToString(), dice))
    except DecodeError:
        return None
