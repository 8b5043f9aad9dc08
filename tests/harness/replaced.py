"""What is replaced in this process: a snapshot of the loaded libraries, by walking them, and what differs later."""

import sys
import types
from typing import Any

LIBRARIES = ("deepspeed", "torch", "lightning", "lightning_fabric", "pytorch_lightning", "accelerate", "transformers")
CODE = (types.FunctionType, types.BuiltinFunctionType, type, property, staticmethod, classmethod)
Snapshot = dict[tuple[str, ...], Any]


def snapshot() -> Snapshot:
    """Functions, classes, switches and the types of other objects, by module or class and name."""
    found: Snapshot = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in LIBRARIES and type(module) is types.ModuleType:
            for attribute, value in list(vars(module).items()):
                note(found, (name, attribute), value)
                if isinstance(value, type) and value.__module__ == name:
                    for member, of_class in list(vars(value).items()):
                        note(found, (name, attribute, member), of_class)
    return found


def note(found: Snapshot, key: tuple[str, ...], value: Any) -> None:
    if isinstance(value, bool) and not key[-1].startswith("_"):  # a switch
        found[key] = value
    elif isinstance(value, CODE):
        found[key] = value
        if isinstance(value, types.FunctionType):
            found[(*key, "__code__")] = value.__code__
    elif isinstance(value, dict) and len(value) < 100:
        items = list(dict.items(value))  # what is in it: the mappings of transformers import all models for their own
        switches = [(name, each) for name, each in items if isinstance(name, str)]
        found |= {(*key, name): each for name, each in switches if isinstance(each, bool)}
    elif type(value).__module__.partition(".")[0] in (*LIBRARIES, "zerosync_strategy"):
        found[(*key, "class")] = type(value)


def differences(before: Snapshot, after: Snapshot) -> list[str]:
    """What is not what it was, or is there and is this package's; what a library has added to itself is its own."""
    changed = {key for key, value in before.items() if after.get(key, None) is not value and after.get(key) != value}
    added = {key for key, value in after.items() if key not in before and is_ours(value)}
    return sorted(".".join(key) for key in changed | added)


def is_ours(value: Any) -> bool:
    if isinstance(value, type):
        return type.__getattribute__(value, "__module__").startswith("zerosync")
    code = getattr(getattr(value, "__func__", value), "__code__", value)
    return "zerosync" in getattr(code, "co_filename", "")
