"""When to ask a server again, and how long to wait before."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

# Request timeout, rate limit, and what proxies and storage say while they are overloaded or restarted.
RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_RESET_IN = re.compile(r"\br=0\s*;\s*t=(\d+)")


@dataclass(frozen=True, slots=True)
class Retry:
    """Exponential backoff with jitter: ``attempts`` tries without progress, waits of ``first`` to ``longest`` seconds.

    A wait the server asks for is kept as it is, unless it exceeds ``longest_asked``: then the caller gives up at once.
    The defaults wait about two minutes in all.
    """

    attempts: int = 8
    first: float = 1.0
    longest: float = 60.0
    longest_asked: float = 600.0

    def delay(self, failures: int, asked: float | None) -> float | None:
        """Seconds to wait after ``failures`` consecutive ones, or None to give up."""
        if failures >= self.attempts or (asked is not None and asked > self.longest_asked):
            return None
        own = min(self.longest, self.first * 2.0 ** (failures - 1)) * random.uniform(0.5, 1.0)
        return own if asked is None else max(asked, own)


def asked_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds a response asks to wait: ``Retry-After`` (seconds or a date), or the Hub's ``RateLimit`` header."""
    value = headers.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value)
    if value:
        try:
            return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
        except ValueError:
            return None
    reset = _RESET_IN.search(headers.get("ratelimit", ""))
    return float(reset.group(1)) if reset else None
