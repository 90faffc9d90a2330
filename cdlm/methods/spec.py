"""Method strings: a row of the table of methods and its choices in one word, as `--method` and stored runs have them.

Strings in checkpoints and results are never rewritten: those of every version are read.
"""

import contextlib
from typing import Any

from cdlm.methods import METHODS, Method

MOVED = {
    "revealed": ("same",),
    "weight": ("step",),
    "order": ("random",),
    "sharpen": ("1", "1.0"),
    "guide": ("0", "0.0"),
    "bridges": ("1",),
}
"""Choices that `mcdlm` and `ucdlm` had up to version 0.1, with the values that changed nothing."""
RENAMED = {"guide": "guidance", "sharpen": "temperature"}
GUIDED, SEARCH = "mcdlm-guided", "-search"


def parse_method(spec: str) -> tuple[Method, dict[str, Any]]:
    """A method and its choices from one word: `mcdlm`, `mcdlm:kappa=0,steps=staged`; also as old versions wrote it."""
    slug, words = split_method(spec)
    if slug not in METHODS:
        if slug.endswith(SEARCH):
            odd = ", ".join(name for name in words if name in MOVED)
            raise ValueError(f"{slug.removesuffix(SEARCH)} no longer has the option {odd}; see studies/search.py")
        raise ValueError(
            f"unknown method {slug!r}; choose from {', '.join(METHODS)}. A method of your own is known only where the "
            "file that adds it to METHODS is run: python FILE.py train ... instead of cdlm train ... (docs/extend.md)"
        )
    method = METHODS[slug]
    choices: dict[str, Any] = {}
    for name, value in words.items():
        kind = type(method.choices.get(name, ""))
        try:
            choices[name] = {"true": True, "false": False}[value] if kind is bool else kind(value)
        except (ValueError, KeyError):
            takes = "true or false" if kind is bool else f"a {kind.__name__}"
            raise ValueError(f"{name} takes {takes}; got {value!r} in {spec!r}") from None
    method(method.default_process(2), **choices)
    return method, choices


def split_method(spec: str) -> tuple[str, dict[str, str]]:
    """The row of the table and the choices that a stored method string stands for, in today's names.

    Method strings in checkpoints and results are never rewritten. Up to version 0.1 `mcdlm` and `ucdlm` had more
    choices. Those of a guided target are now the row `mcdlm-guided`, the others a row of studies/mcdlm_search.py.
    """
    slug, _, rest = spec.partition(":")
    words: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"write choices as name=value; got {item!r} in {spec!r}")
        words[name] = value
    if slug not in ("mcdlm", "ucdlm"):
        return slug, words
    words = {name: value for name, value in words.items() if name not in MOVED or value not in MOVED[name]}
    if not any(name in MOVED for name in words):
        return slug, words
    guided = {RENAMED.get(name, name): value for name, value in words.items() if name != "divergence"}
    if slug == "mcdlm" and words.get("divergence") == "kl" and guided.keys() <= METHODS[GUIDED].choices.keys():
        return GUIDED, {"lam": "0.999", "guidance": "0", "temperature": "1", **guided}
    return slug + SEARCH, words


def same_method(one: str, other: str) -> bool:
    """Whether two method strings stand for the same objective."""

    def settled(spec: str) -> tuple[str, dict[str, Any]]:
        slug, words = split_method(spec)
        if slug not in METHODS:
            return slug, words
        method, choices = parse_method(spec)
        return slug, {**method.choices, **choices}

    return settled(one) == settled(other)


def method_name(spec: str) -> str:
    """The name of the method that a stored string stands for; the string's own word where the table has none."""
    slug = spec.partition(":")[0]
    with contextlib.suppress(ValueError):
        slug = split_method(spec)[0].removesuffix(SEARCH)
    return METHODS[slug].name if slug in METHODS else slug


def needs_trained_model(spec: str) -> bool:
    """Whether a run must start from a trained model: by a method that distils one, or with a frozen target."""
    method, choices = parse_method(spec)
    rule = method(method.default_process(2), **choices).network
    return bool(method.starts_from) or (rule is not None and rule.frozen)
