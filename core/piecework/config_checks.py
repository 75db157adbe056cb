"""What a value of a setting may be: each check returns it in its one form, or says what is wrong with it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any, Literal

from piecework.errors import ConfigError
from piecework.pieces import SplittingOp

Size = int | Mapping[str, int]
"""The rows of a call, or one value per named dim where there are several."""


class CompilationLevel(IntEnum):
    """How much of Piecework is at work; each level includes what the one before it does."""

    NO_COMPILATION = 0
    """The model runs as it was written."""
    DYNAMO_AS_IS = 1
    """``torch.compile`` as it is, with its guards and recompiles."""
    DYNAMO_ONCE = 2
    """Traced once; later calls run on our own checks."""
    PIECEWISE = 3
    """Traced once, split, compiled piece by piece."""


LEVEL_CHOICES = f"0, 1, 2, 3 or a level's name ({', '.join(CompilationLevel.__members__)})"


def check_level(value: Any, what: str) -> CompilationLevel | None:
    """Take a level, its number or its name in any case; None stands for "not decided here"."""
    if value is None:
        return None
    if isinstance(value, str):
        level = find_level(value)
        if level is not None:
            return level
    elif isinstance(value, int) and not isinstance(value, bool) and value in list(CompilationLevel):
        return CompilationLevel(value)
    raise ConfigError(f"{what} must be one of {LEVEL_CHOICES}, got {show(value)}{hint_at_number(value)}")


def find_level(name: str) -> CompilationLevel | None:
    # Some letters outside ASCII turn into ASCII ones by upper().
    return CompilationLevel.__members__.get(name.upper()) if name.isascii() else None


def hint_at_number(value: Any) -> str:
    if isinstance(value, str) and value in ("0", "1", "2", "3"):
        return f"; write {value} without quotes"
    if isinstance(value, float) and value in (0, 1, 2, 3):
        return f"; write {int(value)}"
    return ""


def check_splitting_ops(value: Any, what: str) -> tuple[str | SplittingOp, ...] | None:
    """Take a list or tuple of op names and ``SplittingOp`` objects, or None."""
    if value is None:
        return None
    ops = check_sequence(value, what, of="op names and SplittingOp objects", example="['silly::attention']")
    return tuple(check_splitting_op(op, f"{what}[{index}]") for index, op in enumerate(ops))


def check_splitting_op(value: Any, what: str) -> str | SplittingOp:
    """Take a name, a ``SplittingOp``, or the JSON form of one: ``{"name": ..., "capturable": true}``."""
    if isinstance(value, SplittingOp):
        check_name(value.name, f"{what}.name")
        return value
    if not isinstance(value, Mapping):
        return check_name(value, what, allowed="an op's name such as 'silly::attention', or a SplittingOp")
    flags = ("capturable", "rows_independent")
    for key, flag in value.items():
        if key != "name" and key not in flags:
            raise ConfigError(f"{what}: {unknown(key, ('name', *flags), kind='key')}")
        if key in flags and not isinstance(flag, bool):
            raise ConfigError(f"{what}.{key} must be true or false, got {show(flag)}")
    if "name" not in value:
        raise ConfigError(f"{what} must have the key 'name', the op's name, got {show(value)}")
    return SplittingOp(**{**value, "name": check_name(value["name"], f"{what}.name")})


def check_custom_ops(value: Any, what: str) -> tuple[str, ...]:
    """Take tokens ``all``, ``none``, ``+name`` and ``-name``, as a list or in one comma-separated string.

    Their order means nothing; what contradicts itself is refused.
    """
    if isinstance(value, str):
        tokens = value.split(",") if value.strip() else []
    else:
        tokens = check_sequence(value, what, of="custom-op tokens", example="['none', '+rms_norm']")
    checked = [check_custom_op_token(token, value, what) for token in tokens]
    names = [token[1:] for token in checked if token.startswith("+") and f"-{token[1:]}" in checked]
    pairs = [f"'+{name}' and '-{name}'" for name in names]
    if "all" in checked and "none" in checked:
        pairs.append("'all' and 'none'")
    if pairs:
        raise ConfigError(f"{what} contradicts itself: it holds {', '.join(dict.fromkeys(pairs))}, got {show(value)}")
    return tuple(dict.fromkeys(checked))


def check_custom_op_token(token: Any, value: Any, what: str) -> str:
    allowed = "'all', 'none', '+name' or '-name'"
    stripped = token.strip() if isinstance(token, str) else ""
    if stripped in ("all", "none"):
        return stripped
    name = stripped[1:]
    if stripped[:1] in ("+", "-") and is_custom_op_name(name):
        return stripped
    is_bare = is_custom_op_name(stripped)
    hint = f"; write '+{stripped}' to switch it on, '-{stripped}' to switch it off" if is_bare else ""
    if stripped.lower() in ("all", "none"):
        hint = f"; write '{stripped.lower()}'"
    if stripped in ("+all", "-all", "+none", "-none"):
        hint = f"; write '{name}'"
    where = f"{token!r} in {show(value)}" if isinstance(token, str) and token != value else show(token)
    raise ConfigError(f"{what} must be tokens {allowed}, separated by commas, got {where}{hint}")


def is_custom_op_name(name: str) -> bool:
    """Whether a custom op may be called so: an ASCII identifier other than the two words that mean every op."""
    return name.isascii() and name.isidentifier() and name not in ("all", "none")


def check_sizes(value: Any, what: str) -> tuple[Size, ...]:
    """Take a list or tuple of sizes, each a positive int or a mapping from dim names to positive ints."""
    sizes = check_sequence(value, what, of="sizes", example="[1, 2] or [{'batch': 4, 'seq': 1}]")
    return tuple(check_size(size, f"{what}[{index}]") for index, size in enumerate(sizes))


def check_size(value: Any, what: str) -> Size:
    if isinstance(value, Mapping) and value:
        return {
            check_name(dim, f"a dim of {what}", allowed="a dim's name"): check_length(length, f"{what}[{dim!r}]")
            for dim, length in value.items()
        }
    return check_length(value, what, allowed="a positive integer, or one per named dim such as {'batch': 4, 'seq': 1}")


def check_capture_sizes(value: Any, what: str) -> tuple[Size, ...] | Literal["auto"] | None:
    """Take sizes, ``"auto"`` or None."""
    if value is None or value == "auto":
        return value
    if isinstance(value, str):
        raise ConfigError(f"{what} must be a list of sizes, 'auto' or None, got {show(value)}")
    return check_sizes(value, what)


def check_ratio(value: Any, what: str) -> float:
    """Take a finite number of at least 1."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 1 <= value < math.inf:
        raise ConfigError(f"{what} must be a number from 1 (no padding) up, got {show(value)}")
    return float(value)


def check_optional_bytes(value: Any, what: str) -> int | None:
    """Take a positive number of bytes, or None."""
    return None if value is None else check_length(value, what, allowed="a positive number of bytes, or None")


def check_flag(value: Any, what: str) -> bool:
    """Take True or False."""
    if isinstance(value, bool):
        return value
    raise ConfigError(f"{what} must be True or False, got {show(value)}")


def check_optional_flag(value: Any, what: str) -> bool | None:
    """Take True, False or None."""
    if value is None or isinstance(value, bool):
        return value
    raise ConfigError(f"{what} must be True, False or None, got {show(value)}")


def check_static_inputs(value: Any, what: str) -> tuple[str, ...] | Literal[True]:
    """Take names of arguments, or True for all."""
    if value is True:
        return True
    names = check_sequence(value, what, of="argument names", example="['input_ids'], or True for all")
    return tuple(check_name(name, f"{what}[{index}]", allowed="an argument's name") for index, name in enumerate(names))


def check_length(value: Any, what: str, *, allowed: str = "a positive integer") -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{what} must be {allowed}, got {show(value)}")
    return value


def check_optional_name(value: Any, what: str) -> str | None:
    """Take a name, or None."""
    return None if value is None else check_name(value, what, allowed="a name, or None")


def check_plugin_options(value: Any, what: str) -> dict[str, dict[str, Any]]:
    """Take options by plugin name and copy them; what they mean is checked by the plugin that owns them."""
    form = "{'inductor': {'compile_timeout_s': 60}}"
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} must map plugin names to their options, such as {form}, got {show(value)}")
    options: dict[str, dict[str, Any]] = {}
    for plugin, given in value.items():
        check_name(plugin, f"a key of {what}", allowed="a plugin's name")
        if not isinstance(given, Mapping):
            raise ConfigError(f"{what}[{plugin!r}] must be a mapping of options, such as {form}, got {show(given)}")
        options[plugin] = check_json(given, f"{what}[{plugin!r}]")
    return options


def check_json(value: Any, what: str) -> Any:
    """Copy what JSON can hold, so that a config means the same after a round trip and no caller can change it."""
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, list | tuple):
        return [check_json(item, f"{what}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {
            check_name(key, f"a key of {what}", allowed="a string"): check_json(item, f"{what}[{key!r}]")
            for key, item in value.items()
        }
    raise ConfigError(
        f"{what} must be what JSON can hold (None, bool, finite number, string, list, mapping), got {show(value)}"
    )


def check_sequence(value: Any, what: str, *, of: str, example: str) -> Iterable[Any]:
    if isinstance(value, list | tuple):
        return value
    is_one = isinstance(value, int) and not isinstance(value, bool) or isinstance(value, str) and of != "sizes"
    hint = f"; write [{value!r}]" if is_one else f"; write list({value!r})" if isinstance(value, range) else ""
    raise ConfigError(f"{what} must be a list of {of} such as {example}, got {show(value)}{hint}")


def check_name(value: Any, what: str, *, allowed: str = "a name") -> str:
    if isinstance(value, str) and value.strip():
        return value
    raise ConfigError(f"{what} must be {allowed}, got {show(value)}")


def unknown(name: object, known: Iterable[str], *, kind: str) -> str:
    """Say that a name is not known, which one may have been meant, and which there are."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name).lower(), known, n=3)
    question = f"; did you mean {' or '.join(map(repr, near))}?" if near else ";"
    return f"unknown {kind} {show(name)}{question} the {kind}s are {', '.join(known)}"


def show(value: object) -> str:
    """Return a repr that fits into an error message."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
