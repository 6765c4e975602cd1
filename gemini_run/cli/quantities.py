"""Sizes, bandwidths, times and counts as people write them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_FORM = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%/]*)\s*")

_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_SIZES = {
    **{f"{prefix}b": factor for prefix, factor in _DECIMAL.items()},
    **{f"{prefix}ib": 1024.0 ** (index + 1) for index, prefix in enumerate("kmgtp")},
}
_BANDWIDTHS = {
    **{f"{prefix}bit/s": factor / 8 for prefix, factor in _DECIMAL.items()},
    **{f"{prefix}bps": factor / 8 for prefix, factor in _DECIMAL.items()},
}
_TIMES = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_RATES = {"": 1.0, "%": 0.01}


def size(text: str) -> float:
    """Bytes: ``1.2TB``, ``300GiB``. Raises: ValueError (so do all of this module)."""
    return _parse(text, _SIZES, "a size such as 80GB or 1.2TB")


def bandwidth(text: str) -> float:
    """Bytes per second: ``400Gbps``, ``400Gbit/s`` (bits), ``50GB/s`` (bytes)."""
    example = "a bandwidth such as 400Gbps (bits) or 50GB/s (bytes)"
    if text.strip().endswith("B/s"):
        return _parse(text.strip()[:-2], _SIZES, example)
    if text.strip().endswith("Bps"):  # some write bytes so, others bits
        raise ValueError(f"give {example}")
    return _parse(text, _BANDWIDTHS, example)


def duration(text: str) -> float:
    """Seconds: ``300ms``, ``62s``, ``5m``, ``3h``, ``2d``; a bare number is seconds."""
    return _parse(text, _TIMES, "a time such as 62s, 5m, 3h or 2d")


def count(text: str) -> float:
    """A large number: ``100B`` (1e9 each), ``350M``, ``7e9``."""
    return _parse(text, _COUNTS, "a count such as 100B, 350M or 7e9")


def rate(text: str) -> float:
    """``0.015`` or ``1.5%``."""
    return _parse(text, _RATES, "a number such as 0.015 or 1.5%")


def whole(text: str) -> int:
    """A whole number."""
    if not re.fullmatch(r"\s*[+-]?[0-9]+\s*", text):
        raise ValueError("give a whole number")
    return int(text)


def _parse(text: str, units: Mapping[str, float], example: str) -> float:
    match = _FORM.fullmatch(text)
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"give {example}")
    return float(match[1]) * factor


# --- and back ------------------------------------------------------------------------------------------


def show_size(count: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def show_time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, factor in (("years", 365.25 * 86400), ("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1e3:.3g} ms"


def show_share(value: float) -> str:
    """A probability or share with as many digits as tell it from 0 and 1."""
    if value in (0.0, 1.0):
        return f"{value:.0%}"
    if value > 0.999:
        digits = 2
        while digits < 12 and round(value * 100, digits) == 100:
            digits += 1
        return f"{value * 100:.{digits}f}%"
    return f"{value * 100:.1f}%" if value >= 0.1 else f"{value * 100:.2g}%"
