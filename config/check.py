"""What every setting goes through, whether it came from a preset, a flag, a word in `layers`, or Python."""

from __future__ import annotations

import ast
import types
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def nearest(word: str, known) -> str:
    """` (did you mean 'x'?)`, or nothing when nothing is near: the tail of an error."""
    near = get_close_matches(str(word), list(known), 1, 0.5)
    return f": did you mean {near[0]!r}?" if near else f"; there are {', '.join(map(str, known))}"


def coerce(value: Any, hint: Any, name: str) -> Any:
    """`value` as the type that `hint` names: an int will do for a float, nothing else is converted. ValueError if it won't."""
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        hint = next(a for a in get_args(hint) if a is not type(None))
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError(f"{name}: unknown value {value!r}{nearest(value, get_args(hint))}")
        return value
    if get_origin(hint) is tuple:
        return tuple(coerce(v, get_args(hint)[0], name) for v in (value if isinstance(value, (tuple, list)) else [value]))
    if hint is float and type(value) is int:
        return float(value)
    if hint is not Any and type(value) is not hint:
        raise ValueError(f"{name}={value!r} is no {hint.__name__}")
    return value


def check_fields(config: Any) -> None:
    """Coerces every field of a dataclass in place to its declared type. ValueError names the field."""
    hints = get_type_hints(type(config))
    for f in fields(config):
        setattr(config, f.name, coerce(getattr(config, f.name), hints[f.name], f.name))


def check_range(config: Any, name: str, *, above=None, least=None, below=None, most=None) -> None:
    """ValueError unless the field (None passes) is > above, >= least, < below and <= most."""
    value = getattr(config, name)
    bounds = [("above", above, lambda v, b: v > b), ("at least", least, lambda v, b: v >= b),
              ("below", below, lambda v, b: v < b), ("at most", most, lambda v, b: v <= b)]
    for words, bound, holds in bounds:
        if value is not None and bound is not None and not holds(value, bound):
            raise ValueError(f"{name}={value} must be {words} {bound}")


def options(call: ast.Call, cls: type, name: str) -> Any:
    """`word(option=value)` of the setting `name` as the dataclass of the word's options, checked: names, types, and, by the dataclass
    itself, ranges."""
    word, known, given = ast.unparse(call.func), [f.name for f in fields(cls)], {}
    for keyword in call.keywords:
        if keyword.arg not in known:
            raise ValueError(f"{name}: {word} has no option {keyword.arg!r}{nearest(str(keyword.arg), known)}")
        try:
            given[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError):
            said = f"{word}({ast.unparse(keyword)})"
            raise ValueError(f"{name}: {said}: an option's value is a number, a string, True, False, None, or several of them "
                             "in brackets") from None
    if lacking := [f.name for f in fields(cls) if f.default is MISSING and f.name not in given]:
        raise ValueError(f"{name}: {ast.unparse(call)} lacks {' and '.join(f'{n}=' for n in lacking)}")
    try:
        return cls(**given)
    except ValueError as e:
        raise ValueError(f"{name}: {word}: {e}") from None


def one_of(kinds: dict[str, type], text: str, name: str) -> Any:
    """What the setting `name` says, a word of `kinds` with or without options: `word` or `word(option=value)`. ValueError in one line."""
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        node = ast.Constant(text)
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"{name}: cannot read {text!r}; write word, or word(option=value), and of words there are {', '.join(kinds)}")
    if call.func.id not in kinds:
        raise ValueError(f"{name}: unknown {call.func.id!r}{nearest(call.func.id, kinds)}")
    return options(call, kinds[call.func.id], name)
